"""The one place that uses parts of torch that are not public: modules and names that begin with an underscore, private
attributes of torch's objects, and distinctions by names alone.

Each has a contract test in tests/fusion/torch_private: that it exists, accepts the arguments of its calls, and behaves
as this package relies on. A new version of torch fails there first. These modules import nothing else of this package,
and no other file of it names such a part (tests/test_private_torch.py).
"""
