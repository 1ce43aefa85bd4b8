"""Tensors without data, as fusion.torch_private.tensors uses them."""

import logging

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusion.torch_private import tensors as fake


def _mode(**keywords: object) -> fake.FakeTensorMode:
    return fake.FakeTensorMode(allow_non_fake_inputs=True, **keywords)


def test_a_mode_makes_tensors_without_data() -> None:
    mode = _mode()
    made = mode.from_tensor(torch.ones(2, 3), static_shapes=True)
    with mode:
        product = made @ torch.empty(3, 4)
    assert isinstance(product, fake.FakeTensor) and product.shape == (2, 4)
    assert fake.mode_of(product) is mode and fake.mode_of(torch.ones(2)) is None and fake.mode_of(3) is None
    assert not mode.allow_non_fake_inputs or (made + torch.ones(2, 3)).shape == (2, 3)


def test_failures_are_logged_before_they_are_raised(caplog) -> None:
    with _mode(), caplog.at_level(logging.ERROR, fake.FAKE_TENSOR_LOG.name), pytest.raises(RuntimeError):
        fake.FAKE_TENSOR_LOG.addHandler(caplog.handler)  # torch's loggers hand nothing on
        try:
            torch.ones(3).masked_fill(torch.ones(2, dtype=torch.bool), 0.0)
        finally:
            fake.FAKE_TENSOR_LOG.removeHandler(caplog.handler)
    assert "failed while attempting to run meta" in caplog.text


def test_modes_are_detected() -> None:
    mode = _mode()
    made = mode.from_tensor(torch.ones(2))
    assert fake.detect_fake_mode([3, made]) is mode and fake.detect_fake_mode([3, torch.ones(2)]) is None
    with mode:
        assert fake.detect_fake_mode([]) is mode


def test_modes_can_be_left_for_a_while() -> None:
    with _mode():
        with fake.unset_fake_temporarily():
            assert torch.ones(2).tolist() == [1.0, 1.0]
        assert isinstance(torch.ones(2), fake.FakeTensor)


def test_a_copy_is_no_view_and_has_no_history() -> None:
    mode = _mode()
    with mode:
        view = torch.ones(4, requires_grad=True)[1:]
    assert fake.is_view(view)
    copy = fake.fast_detach(mode, view).requires_grad_(True)
    assert type(copy) is fake.FakeTensor and fake.mode_of(copy) is mode
    assert (copy.shape, copy.stride(), copy.is_leaf) == (view.shape, view.stride(), True)


def test_symbols_are_seen() -> None:
    mode = _mode(shape_env=ShapeEnv())
    open_, fixed = mode.from_tensor(torch.ones(5, 3)), mode.from_tensor(torch.ones(5, 3), static_shapes=True)
    assert fake.has_symbols(open_) and not fake.has_symbols(fixed)
    environment = fake.shape_environment(open_)
    assert environment is mode.shape_env and fake.shape_environment(open_.shape[0]) is environment
    assert fake.shape_environment(torch.ones(2)) is None and fake.shape_environment(3) is None
    before = len(environment.guards) + len(environment.replacements)
    assert open_.shape[0] > 4
    assert len(environment.guards) + len(environment.replacements) > before


def test_what_is_asked_without_guards_is_not_asked_again() -> None:
    mode = _mode(shape_env=ShapeEnv())
    open_ = mode.from_tensor(torch.ones(5, 3))
    before = len(mode.shape_env.guards)
    with mode, fake.without_guards():
        assert open_.shape[0] > 4
    assert len(mode.shape_env.guards) == before
    with fake.without_guards():  # and none without a mode
        pass


def test_values_that_torch_follows_are_known() -> None:
    with _mode(shape_env=ShapeEnv()) as mode:
        known = torch.tensor(3)
    unknown = mode.from_tensor(torch.tensor(3))
    assert fake.constant_of(unknown) is None
    constant = fake.constant_of(known)
    assert constant is None or constant.item() == 3


def test_an_item_is_remembered() -> None:
    environment = ShapeEnv(allow_scalar_outputs=True)
    mode = _mode(shape_env=environment)
    tensor, symbol = mode.from_tensor(torch.tensor(3)), environment.create_unbacked_symint()
    fake.remember_item(tensor, symbol)
    with mode:
        assert tensor.item().node.expr is symbol.node.expr


def test_python_rules_are_enabled() -> None:
    """Without it, some composite operators have no rule for tensors without data that take symbols."""
    mode = _mode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.ones(5, 4))
    with mode, torch.no_grad(), fake.enable_python_dispatcher():
        assert torch.ops.aten.reshape.default(x, [x.shape[0] * 4]).shape[0] == x.shape[0] * 4


def test_plain_values_are_real() -> None:
    x = torch.ones(2)
    assert fake.real_object(x) is x and fake.real_object(3) == 3


class _Counter:
    """An object that torch knows as a class of its own."""


def test_a_stand_in_has_its_object() -> None:
    from torch._library.fake_class_registry import FakeScriptObject

    assert isinstance(fake.real_object(FakeScriptObject(None, "counter", _Counter())), _Counter)
