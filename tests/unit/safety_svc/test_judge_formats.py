"""Judgements of guard models are read for certain or not at all: what they may garble neither allows nor forbids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safety_svc.judge_formats import FORMATS, JudgeTerms
from safety_svc.policy import ModelJudge, PolicyError, load_policy

POLICY = "No launch codes."


@pytest.mark.parametrize(
    ("terms", "answer", "forbids"),
    [
        (JudgeTerms("llama_guard"), "\n\nsafe", False),
        (JudgeTerms("llama_guard"), "\n\nunsafe\nS9", True),
        (JudgeTerms("llama_guard"), "unsafe", True),
        (JudgeTerms("llama_guard", categories=("S1",)), "unsafe\nS9,S14", False),
        (JudgeTerms("llama_guard", categories=("S1", "S14")), "unsafe\nS9, S14", True),
        (JudgeTerms("llama_guard"), "safe\nunsafe", None),
        (JudgeTerms("llama_guard"), "unsafe\nignore that", None),
        (JudgeTerms("llama_guard"), "I think that it is safe", None),
        (JudgeTerms("llama_guard"), "", None),
        (JudgeTerms("granite_guardian"), "Yes\n<confidence> High </confidence>", True),
        (JudgeTerms("granite_guardian"), "No", False),
        (JudgeTerms("granite_guardian"), "<think>\n</think>\n<score> yes </score>", True),
        (JudgeTerms("granite_guardian"), "<score>no</score>", False),
        (JudgeTerms("granite_guardian"), "<score> yes </score> <score> no </score>", None),
        (JudgeTerms("granite_guardian"), "No <score> maybe </score>", None),
        (JudgeTerms("granite_guardian"), "Failed", None),
        (JudgeTerms("shieldgemma", POLICY), "Yes, since it asks for a code", True),
        (JudgeTerms("shieldgemma", POLICY), " No", False),
        (JudgeTerms("shieldgemma", POLICY), "Nope", None),
        (JudgeTerms("shieldgemma", POLICY), "**", None),
        (JudgeTerms("qwen3guard"), "Safety: Safe\nCategories: None", False),
        (JudgeTerms("qwen3guard"), "Safety: Unsafe\nCategories: Violent, Jailbreak", True),
        (JudgeTerms("qwen3guard", categories=("PII",)), "Safety: Unsafe\nCategories: Violent", False),
        (JudgeTerms("qwen3guard", categories=("PII",)), "Safety: Unsafe\nCategories: None", True),
        (JudgeTerms("qwen3guard"), "Safety: Controversial\nCategories: Unethical Acts", False),
        (JudgeTerms("qwen3guard", strict=True), "Safety: Controversial\nCategories: Unethical Acts", True),
        (JudgeTerms("qwen3guard"), "Safety: Safe\nSafety: Unsafe", None),
        (JudgeTerms("qwen3guard"), "Safety: Fine", None),
        (JudgeTerms("gpt_oss_safeguard", POLICY), '{"violation": 1, "policy_category": "codes"}', True),
        (JudgeTerms("gpt_oss_safeguard", POLICY), ' {"violation": 0}', False),
        (JudgeTerms("gpt_oss_safeguard", POLICY), "1", True),
        (JudgeTerms("gpt_oss_safeguard", POLICY, ("other",)), '{"violation": 1, "policy_category": "codes"}', False),
        (JudgeTerms("gpt_oss_safeguard", POLICY), '{"violation": 2}', None),
        (JudgeTerms("gpt_oss_safeguard", POLICY), '{"violation": "no"}', None),
        (JudgeTerms("gpt_oss_safeguard", POLICY), "It does not violate the policy.", None),
    ],
)
def test_answers(terms: JudgeTerms, answer: str, forbids: bool | None) -> None:
    """As the models' cards show them, and as a model that is led astray may write."""
    assert FORMATS[terms.format].forbids(terms, answer) is forbids


@given(
    st.sampled_from(sorted(FORMATS)), st.text(), st.sampled_from(["", "safe", "Yes", "Safety: Safe\n", "{", "<score>"])
)
def test_garbage_never_raises(name: Any, text: str, begin: str) -> None:
    """Whatever a model writes, there is a judgement or there is none."""
    terms = JudgeTerms(name, POLICY)
    assert FORMATS[terms.format].forbids(terms, begin + text) in (True, False, None)


def test_what_models_are_told() -> None:
    """The text is the user's; the policy goes where the model's template expects it."""
    prompts = {name: FORMATS[name].prompt_for(JudgeTerms(name, POLICY), "a text", False) for name in FORMATS}
    assert all(("user", "a text") in prompt.messages for prompt in prompts.values())
    assert prompts["shieldgemma"].options == {"guideline": POLICY}
    assert prompts["granite_guardian"].options["guardian_config"]["custom_criteria"] == POLICY
    assert prompts["gpt_oss_safeguard"].messages[0][1].startswith(POLICY)
    harm = FORMATS["granite_guardian"].prompt_for(JudgeTerms("granite_guardian"), "an answer", True)
    assert harm.options["guardian_config"] == {"risk_name": "harm", "criteria_id": "harm"}
    assert harm.messages[-1] == ("assistant", "an answer")


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ('format = "llama_guard"\npolicy = "x"', "takes no policy"),
        ('format = "shieldgemma"', "give a policy"),
        ('format = "shieldgemma"\npolicy = "x"\ncategories = ["y"]', "names no categories"),
        ('format = "granite_guardian"\ncategories = ["harm", "violence"]', "at most one"),
        ('format = "gpt_oss_safeguard"', "give a policy"),
        ('format = "another"', "Invalid enum value"),
        ('format = "llama_guard"\napplies_to = ["answer"]', "use mode monitor or review"),
        ('format = "llama_guard"\nphrases = ["x"]', "unknown field"),
    ],
)
def test_rules_that_say_nothing_sensible(tmp_path: Path, fields: str, fault: str) -> None:
    path = tmp_path / "policy.toml"
    common = '[[rules]]\nname = "guard"\nkind = "judge"\nmodel = "m"\n'
    path.write_text(common + ("" if "applies_to" in fields else 'applies_to = ["prompt"]\n') + fields)
    with pytest.raises(PolicyError, match=fault):
        load_policy(path)


def test_a_rule(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(
        '[[rules]]\nname = "guard"\nkind = "judge"\nmodel = "m"\nformat = "llama_guard"\napplies_to = ["prompt"]\n'
        'categories = ["S1"]\n'
    )
    [judge] = load_policy(path).guardrails
    assert isinstance(judge, ModelJudge)
    assert (judge.model, judge.terms.categories, judge.timeout_seconds) == ("m", ("S1",), 5.0)
