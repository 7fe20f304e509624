"""Rule kinds of other packages: their settings, and what happens when they fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from safety_svc.classify import broken_categories
from safety_svc.policy import PolicyError, SafetyPolicy, load_policy
from safety_svc.prefilter import answer_prefilter, prompt_prefilter
from safety_svc.rule_plugins import RuleFailedError
from safety_svc.screen import AnswerScreener, check_long_prompt, check_prompt
from tests.fakes.plugin_site import PluginSite

GROUP = "kvloom.safety_rules"
RULE = '[[rules]]\nname = "r"\nkind = "acme"\nmessage = "No."\n'
SCRIPTED = """
class Acme:
    max_length = 8
    def __init__(self, fields):
        self.max_length = fields.get("max_length", 8)
        self.prefixes = tuple(fields.get("prefixes", ()))
    def find(self, text, start):
        at = text.find("bad", start)
        if "fail" in text:
            raise ValueError(text)
        if "long" in text:
            return start, len(text)
        if "none" in text:
            return start, start
        return None if at < 0 else (at, at + 3)
"""


def policy_with(site: PluginSite, text: str = RULE, source: str = SCRIPTED) -> SafetyPolicy:
    if not (site.folder / "acme_rules.py").exists():
        site.install("acme_rules", GROUP, {"acme": "acme_rules:Acme"}, source)
    path: Path = site.folder / "policy.toml"
    path.write_text(text)
    return load_policy(path)


def test_a_rule_of_a_plugin_blocks_and_classifies(plugin_site: PluginSite) -> None:
    """It is a rule like others: it names itself, and moderations know its category."""
    policy = policy_with(plugin_site, RULE + 'category = "c"\napplies_to = ["prompt"]\n')
    hit = check_prompt(policy.prompt, "so bad")
    assert hit is not None
    assert (hit.rule.name, hit.rule.message, hit.start, hit.is_failure) == ("r", "No.", 3, False)
    assert policy.categories == ("c",)
    assert not policy.answer
    assert prompt_prefilter(policy.prompt) is None, "without prefixes, routers must send every prompt"


async def test_moderations_and_long_prompts_use_it(plugin_site: PluginSite) -> None:
    """Both have a way of their own through the rules."""
    policy = policy_with(plugin_site)
    assert await broken_categories(policy, "so bad") == {"r"}
    hit = await check_long_prompt(policy.prompt, "x" * 10_000 + "bad")
    assert hit is not None
    assert hit.start == 10_000
    with pytest.raises(RuleFailedError):
        await broken_categories(policy, "fail")


def test_prefixes_let_routers_clear_text_by_themselves(plugin_site: PluginSite) -> None:
    """With them, a plugin's rule costs nothing for text in which none of its passages can begin."""
    policy = policy_with(plugin_site, RULE + 'prefixes = ["ba"]\n')
    prefilter = answer_prefilter(policy.answer)
    assert prefilter is not None
    assert list(prefilter.beginnings) == ["ba"]
    screener = AnswerScreener(policy.answer)
    screener.push("fine text, b")
    assert screener.num_clear_chars == len("fine text, ")


@pytest.mark.parametrize("text", ["this fails", "much longer than eight", "none"])
def test_a_rule_that_fails_clears_nothing_more(plugin_site: PluginSite, text: str) -> None:
    """What could not be judged is not shown; the log names the rule and has no word of the text."""
    policy = policy_with(plugin_site)
    screener = AnswerScreener(policy.answer)
    screener.push("good so far ")
    cleared = screener.num_clear_chars
    with capture_logs() as lines:
        screener.push(text)
    assert screener.hit is not None
    assert screener.hit.is_failure
    assert screener.num_clear_chars == cleared == len("good so far ") - 8
    assert [(line["event"], line["rule"]) for line in lines] == [("safety_rule_failed", "r")]
    assert text not in str(lines)


def test_a_forbidden_passage_goes_before_a_failure(plugin_site: PluginSite) -> None:
    """A text that is known to be forbidden is blocked, even where failures are let pass."""
    policy = policy_with(plugin_site, RULE + '[[rules]]\nname = "p"\nphrases = ["launch code"]\n')
    hit = check_prompt(policy.prompt, "fail, launch code")
    assert hit is not None
    assert (hit.rule.name, hit.is_failure) == ("p", False)


def test_a_passage_without_its_prefix_is_a_failure(plugin_site: PluginSite) -> None:
    """Routers clear text by the prefixes: a wrong one would hide the rule's passages."""
    policy = policy_with(plugin_site, RULE + 'prefixes = ["no"]\n')
    hit = check_prompt(policy.prompt, "no bad")
    assert hit is not None
    assert hit.is_failure


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            RULE.replace("acme", "acne"),
            r"rule 'r': There is no kind of safety rule named 'acne'.*acme, guardrail, judge, pii, text",
        ),
        (RULE + "max_length = 5000\n", r"rule 'r': max_length of the kind 'acme' is not a number from 1 to 4096"),
        (RULE + "max_length = 2\nprefixes = ['abc']\n", r"rule 'r': prefixes must have 1 to 2"),
        (RULE + "prefixes = [1]\n", r"rule 'r': prefixes of the kind 'acme' is not a tuple of texts"),
        (RULE + "applies_to = ['answers']\n", r"rule 'r': .*answers"),
        ("[[rules]]\nname = 'r'\nkind = 3\n", r"rule 'r': .*str"),
        (RULE + "prefixes = 3\n", r"rule 'r': TypeError"),
    ],
)
def test_a_bad_rule_is_refused_by_name(plugin_site: PluginSite, text: str, says: str) -> None:
    """A policy whose rule does not work must not be taken into force."""
    with pytest.raises(PolicyError, match=says):
        policy_with(plugin_site, text)


def test_a_rule_that_forbids_the_empty_text_is_refused(plugin_site: PluginSite) -> None:
    """It would block everything."""
    source = SCRIPTED.replace("return None if at < 0 else", "return (0, 0) if not text else")
    with pytest.raises(PolicyError, match="empty text"):
        policy_with(plugin_site, source=source)
