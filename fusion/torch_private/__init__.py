"""The one place that knows parts of torch that are not public: modules and names that begin with an underscore, private
attributes of torch's objects, and what is told by names alone.

Each has a contract test in tests/fusion/torch_private: that it exists, takes what it is called with here, and does what
is relied on. A new version of torch fails there first. Nothing here knows the rest of this package, and no other file
of it names such a part (tests/test_private_torch.py).
"""
