"""Lines of independent parts are written in turns, and never before what they use."""

from __future__ import annotations

from functools import partial

from fusion.codegen.mlir.builder import PTR, Builder, Value


def chain(b: Builder, x: Value, length: int) -> Value:
    for _ in range(length):
        x = b.unary("math.absf", x, "x")
    return x


def lines(b: Builder) -> list[str]:
    return [line.strip() for line in b.text().splitlines()]


def test_chains_are_written_in_turns() -> None:
    b = Builder()
    one, two = Value("%one", "f32"), Value("%two", "f32")
    results = b.side_by_side([partial(chain, b, one, 2), partial(chain, b, two, 3)])
    assert [line.split(" = ")[0] for line in lines(b)] == ["%x", "%x_2", "%x_1", "%x_3", "%x_4"]
    assert [value.name for value in results] == ["%x_1", "%x_4"]


def test_a_part_that_uses_another_waits_for_it() -> None:
    b = Builder()
    shared: list[Value] = []

    def first() -> Value:
        shared.append(chain(b, Value("%one", "f32"), 3))
        return shared[0]

    def second() -> Value:
        return b.unary("math.absf", shared[0], "y")

    b.side_by_side([first, second])
    assert [line.split(" = ")[0] for line in lines(b)] == ["%x", "%x_1", "%x_2", "%y"]


def test_parts_with_regions_stay_whole() -> None:
    b = Builder()

    def looping(name: str) -> None:
        with b.loop(0, 4, hint=name) as index:
            b.store(index, Value("%p", PTR))

    b.side_by_side([partial(looping, "i"), partial(looping, "j")])
    text = "\n".join(lines(b))
    assert text.index("}") < text.index("%j")
