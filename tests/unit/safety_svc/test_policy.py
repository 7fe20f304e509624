"""The policy file and folding: errors in the file are reported, and spelling tricks do not get past a deny list."""

from __future__ import annotations

from pathlib import Path

import pytest

from safety_svc.folding import fold
from safety_svc.policy import BUILTIN_POLICY, PolicyError, load_policy
from safety_svc.policy_file import PolicyFile
from safety_svc.screen import check_prompt


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return path


def rule(**fields: object) -> str:
    lines = [f"{name} = {value!r}" for name, value in {"name": "r", **fields}.items()]
    return "[[rules]]\n" + "\n".join(lines).replace("True", "true").replace("False", "false") + "\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[rules]\n", r"line 1"),
        ("[[rules]]\nname = 'r'\n", r"rule 'r': has neither"),
        (rule(phrases=["a"], colour="red"), r"colour"),
        (rule(phrases="a"), r"phrases"),
        (rule(phrases=["a"], applies_to=["answers"]), r"answers"),
        (rule(phrases=["a"], applies_to=[]), r"applies_to"),
        (rule(phrases=["   "]), r"rule 'r': the phrase .* is empty"),
        (rule(phrases=["C++"], spaced=True), r"rule 'r': the phrase 'C\+\+' has too few letters"),
        (rule(patterns=["a(b"]), r"rule 'r': pattern 'a\(b': missing"),
        (rule(patterns=["(a)\\1"]).replace("\\\\", "\\"), r"rule 'r': pattern .* invalid escape"),
        (rule(patterns=["a*"]), r"matches the empty text"),
        (rule(patterns=["ab"], prefixes=[""]), r"prefixes must have 1 to 64"),
        (rule(patterns=["ab"], prefixes=["abc"], max_length=2), r"prefixes must have 1 to 2"),
        (rule(patterns=["ab"], max_length=0), r"max_length"),
        (rule(phrases=["a"]) + rule(phrases=["b"]), r"'r': the name is used twice"),
        (rule(kind="injection", mode="gate"), r"rule 'r': an injection rule is too easily deceived to gate with"),
        (rule(kind="injection", applies_to=["answer"]), r"use mode monitor or review, for prompts"),
    ],
)
def test_a_broken_policy_names_the_file_and_the_problem(tmp_path: Path, text: str, says: str) -> None:
    """The error message tells the author of a policy where the mistake is."""
    with pytest.raises(PolicyError, match=says) as caught:
        load_policy(write(tmp_path, text))
    assert "policy.toml: " in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A wrong path is the usual mistake at the first start."""
    with pytest.raises(PolicyError, match="No such file"):
        load_policy(tmp_path / "policy.toml")


@pytest.mark.parametrize(
    "text",
    [
        "LAUNCH code",
        "launch\n\t  code",
        "ｌａｕｎｃｈ　ｃｏｄｅ",
        "la\u200bunch co\u00adde",
        "launch\ufe0f code",
        "𝓵𝓪𝓾𝓷𝓬𝓱 code",
        "the launch code.",
        "«launch code»",
    ],
)
def test_spellings_that_look_the_same_are_found(tmp_path: Path, text: str) -> None:
    """Case, width, spacing, invisible characters and fancy letters do not hide a phrase."""
    policy = load_policy(write(tmp_path, rule(phrases=["Launch Code"])))
    assert check_prompt(policy.prompt, text) is not None


@pytest.mark.parametrize(
    "text", ["launch codec", "prelaunch code", "launch_code", "launch", "launch the code", "launch codé"]
)
def test_other_words_are_not(tmp_path: Path, text: str) -> None:
    """A deny list that hits ordinary words would be switched off."""
    policy = load_policy(write(tmp_path, rule(phrases=["launch code"])))
    assert check_prompt(policy.prompt, text) is None


@pytest.mark.parametrize(
    "text",
    [
        "l a u n c h  c o d e",
        "l.a.u.n.c.h.c.o.d.e",
        "the L-A-U-N-C-H / C-O-D-E, please",
        "l\u200b a\u00ad u\ufe0f n c h code",
        "ｌ　ａ　ｕ　ｎ　ｃ　ｈ　ｃ　ｏ　ｄ　ｅ",
        "la_unch...code",
        "launchcode",
        "l а u n c h c 0 d e",
    ],
)
def test_spaced_out_letters_are_found_where_the_rule_says_so(tmp_path: Path, text: str) -> None:
    """What stands between the letters does not hide a phrase, together with the other tricks."""
    for more in ({}, {"spaced": True, "confusables": True}):
        policy = load_policy(write(tmp_path, rule(phrases=["launch code"], **more)))
        assert (check_prompt(policy.prompt, text) is not None) == bool(more)


@pytest.mark.parametrize("text", ["prelaunch-code", "l.a.u.n.c.h.c.o.d", "l....aunch code", "launch codec"])
def test_other_letters_are_not(tmp_path: Path, text: str) -> None:
    """A passage has all letters, no more than three characters between them, and is no part of a longer word."""
    policy = load_policy(write(tmp_path, rule(phrases=["launch code"], spaced=True)))
    assert check_prompt(policy.prompt, text) is None


def test_accents_and_syllables(tmp_path: Path) -> None:
    """An é typed as one or as two characters folds to the same; a Hangul syllable is no part of another."""
    policy = load_policy(write(tmp_path, rule(phrases=["café", "가"], whole_words=False)))
    for text in ("caf\u00e9", "cafe\u0301", "CAFE\u0301s", "가나"):
        assert check_prompt(policy.prompt, text) is not None
    for text in ("cafe", "각"):
        assert check_prompt(policy.prompt, text) is None


def test_folding_tells_where_every_character_came_from() -> None:
    """The position of a hit counts characters of the original text."""
    folded, offsets = fold("ﬁ  ß\u200b A")
    assert folded == "fi ss a"
    assert list(offsets) == [0, 0, 1, 3, 3, 5, 6]


def test_parts_without_whole_words(tmp_path: Path) -> None:
    """`whole_words = false` finds a phrase inside words."""
    policy = load_policy(write(tmp_path, rule(phrases=["bomb"], whole_words=False)))
    assert check_prompt(policy.prompt, "a bombing") is not None


def test_rules_apply_where_they_say(tmp_path: Path) -> None:
    """A rule for answers does not apply to prompts, and the policy state reports which texts need to be sent."""
    policy = load_policy(write(tmp_path, rule(phrases=["secret"], applies_to=["answer"])))
    assert not policy.prompt
    assert policy.answer
    assert check_prompt(policy.prompt, "secret") is None
    assert check_prompt(policy.answer, "secret") is not None


def test_a_long_prompt_of_beginnings_is_searched_in_linear_time(tmp_path: Path) -> None:
    """A megabyte of first characters must not keep the service busy for minutes. It did when the search for the
    beginning of a phrase compared the text from every position to its end."""
    policy = load_policy(write(tmp_path, rule(phrases=["launch code"], patterns=["lol{3}"], prefixes=["lol"])))
    assert check_prompt(policy.prompt, "l" * 1_000_000) is None


KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA7bq"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"here: {KEY}", "private-key"),
        (KEY.replace("RSA ", "").replace("\n", "\\n"), "private-key"),
        ("id AKIAABCDEFGHIJKLMNOP.", "cloud-access-key"),
        ("What does -----BEGIN PRIVATE KEY----- mean?", None),
        ("-----BEGIN PUBLIC KEY-----\nMIIEpAIBAAKCAQEA7bq", None),
        ("XAKIAABCDEFGHIJKLMNOPQ", None),
    ],
)
def test_the_built_in_policy(text: str, name: str | None) -> None:
    """The built-in policy blocks keys, but not text about keys."""
    hit = check_prompt(load_policy(BUILTIN_POLICY).prompt, text)
    assert (hit and hit.rule.name) == name


async def test_a_changed_file_is_taken_and_a_broken_one_is_not(tmp_path: Path) -> None:
    """A mistake while editing must not leave the service without a policy."""
    path = write(tmp_path, rule(phrases=["one"]))
    policy_file = PolicyFile(str(path))
    changes: list[str] = []
    policy_file.listen(lambda: changes.append(policy_file.current.revision))
    first = policy_file.current.revision
    await policy_file.reload_if_changed()
    path.write_text("[[rules")
    await policy_file.reload_if_changed()
    assert policy_file.current.revision == first
    path.unlink()
    await policy_file.reload_if_changed()
    assert policy_file.current.revision == first
    path.write_text(rule(phrases=["two words"]))
    await policy_file.reload_if_changed()
    assert changes == [policy_file.current.revision]
    assert changes != [first]
    assert check_prompt(policy_file.current.prompt, "two words") is not None
