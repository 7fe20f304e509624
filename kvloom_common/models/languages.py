"""The language of a text, by its script and its most frequent words. It knows the languages of
`kvloom_common.config.Language`, needs no library, and says "" rather than guess: of texts with few or no frequent
words.

tests/unit/kvloom_common/models/test_languages.py measures how often it is right.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final, get_args

from kvloom_common.config import Language

NUM_READ_CHARS: Final = 2000
"""How much of a text is read: its beginning."""
_MIN_SCORE: Final = 2
"""A single frequent word may be a name."""

_SCRIPTS: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    ("ja", re.compile("[぀-ヿ]")),  # before zh: Japanese has kana between its Chinese characters
    ("ko", re.compile("[가-힣]")),
    ("zh", re.compile("[一-鿿]")),
    ("uk", re.compile("[іїєґІЇЄҐ]")),  # before ru, which has none of these letters
    ("ru", re.compile("[а-яА-ЯёЁ]")),
    ("el", re.compile("[Ͱ-Ͽ]")),
    ("ar", re.compile("[؀-ۿ]")),
    ("he", re.compile("[א-ת]")),
    ("hi", re.compile("[ऀ-ॿ]")),
    ("th", re.compile("[ก-๛]")),
)
_WORD: Final = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_FREQUENT: Final = {
    language: frozenset(words.split())
    for language, words in {
        "en": "the and of to is are was were what how why who which that this with for you your have has it its my "
        "me we do does did can could would should please write not from be by on an at if about give explain "
        "they i i'm don't",
        "de": "der die das und ist sind war nicht ein eine einen einem einer mit für auf von zu zum zur den dem des "
        "was wie warum wer welche ich du er wir ihr sie mir mich bitte kann kannst auch es im aus bei nach "
        "über schreibe erkläre hat haben wird werden gibt wo wenn dass um",
        "fr": "le la les des et est sont était une un du que qui quoi dans pour pas avec sur je tu il nous vous ils "
        "elle ce cette ces mon ma votre plus comment pourquoi quel quelle quels au aux ne se en peux peut "
        "écris explique fait c'est s'il ai a-t-il où d'un d'une l'on j'ai n'est qu'est",
        "es": "el la los las de y es son era una un unos que qué en por para con no se lo le me mi tu su cómo cuál "
        "cuáles quién dónde cuándo este esta estos del al más muy como hay está escribe explica puedes favor "
        "yo pero sobre desde",
        "it": "il lo la gli le di e è sono era una un uno che chi cosa in per con non si mi ti ci del della dei "
        "delle nel nella al alla come perché quale quali questo questa più anche ho ha hai scrivi spiega puoi "
        "dove quando da dal c'è dell'acqua l'ho",
        "pt": "o os as um uma uns de do da dos das e é são era que em no na nos nas por para com não se me meu "
        "minha seu sua como qual quais quem onde quando este esta isso mais muito você eu ele escreva "
        "explique pode foi ao à há",
        "nl": "de het een en is zijn was waren niet met voor op van te naar dat die dit wat hoe waarom wie welke ik "
        "je jij u hij wij ze mij mijn uw kan kun ook er uit bij als over schrijf leg heeft hebben wordt "
        "worden waar geef om aan",
        "sv": "och är en ett det den de som att i på av för med inte var vad hur varför vem vilken vilka jag du han "
        "hon vi mig min din kan också om från till har hade skriv förklara blir när där eller så ska",
        "pl": "i w na z do jest są był była nie się to że co jak dlaczego kto który która które czy dla po od za "
        "przez o ja ty on my mi mnie mój moja proszę może można napisz wyjaśnij gdzie kiedy ale lub jego tym",
        "tr": "ve bir bu şu için ile ne nasıl neden niçin kim hangi mi mı mu mü değil var yok ben sen o biz siz da "
        "de ki çok daha gibi kadar olan olarak bana lütfen yaz açıkla nedir nerede sonra en her ama",
    }.items()
}


def language_of(text: str) -> str:
    """The ISO 639-1 code, one of `Language`; "" if it is not clear."""
    beginning = text[:NUM_READ_CHARS]
    words = [word.lower().replace("’", "'") for word in _WORD.findall(beginning)]
    letters = sum(map(len, words))
    for language, script in _SCRIPTS:
        # A text in one script may quote names and code in Latin letters, and a Latin text a few foreign words.
        if len(script.findall(beginning)) > (0.02 if language in ("ja", "uk") else 0.3) * letters:
            return language
    scores = Counter({language: sum(word in frequent for word in words) for language, frequent in _FREQUENT.items()})
    (best, score), (_, second) = scores.most_common(2)
    return best if score >= min(_MIN_SCORE, len(words)) and score > second else ""


assert {*_FREQUENT, *(language for language, _ in _SCRIPTS)} == set(get_args(Language))
