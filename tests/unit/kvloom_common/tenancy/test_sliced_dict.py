"""The dictionary of large tables."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvloom_common.tenancy.sliced_dict import NUM_SLICES, SlicedDict

KEYS = st.one_of(st.text(max_size=2), st.binary(max_size=2))


@given(st.lists(st.tuples(st.sampled_from(["set", "pop"]), KEYS, st.integers())))
def test_it_is_a_dictionary(steps: list[tuple[str, str | bytes, int]]) -> None:
    """Slices must not be noticed."""
    sliced: SlicedDict[str | bytes, int] = SlicedDict()
    plain: dict[str | bytes, int] = {}
    for step, key, value in steps:
        if step == "set":
            sliced[key] = plain[key] = value
        else:
            assert sliced.pop(key) == plain.pop(key, None)
        assert sliced.get(key) == plain.get(key)
    assert len(sliced) == len(plain)
    assert sorted(value for number in range(NUM_SLICES) for value in sliced.values_of(number)) == sorted(plain.values())


def test_its_slices_are_alike() -> None:
    """One slice with most of the entries would take as long as the whole."""
    sliced: SlicedDict[str, int] = SlicedDict()
    for number in range(20_000):
        sliced[f"{number:016x}"] = number
    assert max(len(list(sliced.values_of(number))) for number in range(NUM_SLICES)) < 200
