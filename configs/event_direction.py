"""The provisional rule of the event-direction protocol: which way the work goes in a continuation.

A rule, not a person: what it says is marked as a rule's wherever it is written. The words are of
the paper's two directions, workforce expansion and contraction.
"""

from moejax.analysis.annotation import LABELS

WORDS = {
  "hiring": ("招人", "招聘", "招工", "聘请", "聘用", "录用", "入职", "加入", "hiring", "recruit"),
  "layoffs": ("裁员", "裁掉", "辞退", "解雇", "下岗", "失业", "倒闭", "layoff", "laid off"),
}

assert {*WORDS, "other"} == set(LABELS)


def rule(text: str) -> str:
  """The direction whose word comes first in the text; "other" where there is none."""
  found = [
    (text.index(word), label) for label, words in WORDS.items() for word in words if word in text
  ]
  return min(found)[1] if found else "other"
