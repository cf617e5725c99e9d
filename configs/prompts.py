"""Prompts of the studies: three for depth, 13 for replay, 50 for breadth.

The depth prompts are the reduction paper's; the others were written for this project. A sensitivity
candidate breaks off where several continuations are close.
"""

from collections import Counter
import dataclasses


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A prompt.

  Attributes:
    id: unique.
    text: to continue.
    language: "en" or "zh".
    kind: "ordinary" or "candidate".
  """

  id: str
  text: str
  language: str
  kind: str


_ENGLISH = (
  "why the sheep",
  "Morning light filled the room",
  "The little boy looked at",
  "Once upon a time there was",
  "The old man said that",
  "In the morning the king",
  "The government announced",
  "When the rain stopped",
  "My friend told me",
  "The river runs through",
  "He was born in",
  "A new study shows",
  "The children went to the",
  "It was a dark night",
  "The ship sailed",
  "They decided to",
  "The teacher asked",
  "After the war",
  "The cat sat on",
  "The queen was very",
)
_ENGLISH_CANDIDATES = (
  "She opened the door and",
  "Nobody knew why",
  "I have always wanted to",
  "The first time I saw",
  "People in the city",
)
_CHINESE = (
  "朋友昨天打来电话",
  "早晨的阳光照进房间",
  "从前有一个",
  "小兔子高兴地说",
  "老人慢慢地走",
  "今天天气很好",
  "妈妈告诉我",
  "公司决定",
  "这部电影",
  "请问附近有没有",
  "森林里住着",
  "有一天，国王",
  "他们一起去",
  "老师问大家",
  "雨停了以后",
  "这座城市位于",
  "年轻人应该",
  "小猫看见",
  "村子里的人",
  "在遥远的地方",
)
_CHINESE_CANDIDATES = ("他打开门", "没有人知道", "我最喜欢的", "第一次见到他", "她轻轻地")


def _prompts() -> tuple[Prompt, ...]:
  groups = (
    ("en", "ordinary", _ENGLISH),
    ("en", "candidate", _ENGLISH_CANDIDATES),
    ("zh", "ordinary", _CHINESE),
    ("zh", "candidate", _CHINESE_CANDIDATES),
  )
  return tuple(
    Prompt(f"{language}-{kind[0]}{number:02}", text, language, kind)
    for language, kind, texts in groups
    for number, text in enumerate(texts)
  )


def _named(*texts: str) -> tuple[Prompt, ...]:
  return tuple(next(prompt for prompt in BREADTH if prompt.text == text) for text in texts)


BREADTH = _prompts()
DEPTH = _named("why the sheep", "Morning light filled the room", "朋友昨天打来电话")
REPLAY = DEPTH + _named(
  "The little boy looked at",
  "Once upon a time there was",
  "When the rain stopped",
  "The government announced",
  "The teacher asked",
  "从前有一个",
  "早晨的阳光照进房间",
  "今天天气很好",
  "森林里住着",
  "这部电影",
)


def check(prompts: tuple[Prompt, ...], languages: dict[str, int], kinds: dict[str, int]) -> None:
  """Refuses a set with repeated prompts, or of another composition.

  Raises:
    ValueError: says what was expected.
  """
  texts = Counter(prompt.text for prompt in prompts)
  if texts.total() != len(texts):
    raise ValueError(f"the prompt {texts.most_common(1)[0][0]!r} is repeated.")
  for name, expected in (("language", languages), ("kind", kinds)):
    found = dict(Counter(getattr(prompt, name) for prompt in prompts))
    if found != expected:
      raise ValueError(f"prompts by {name} are {found}, expected {expected}.")


check(BREADTH, {"en": 25, "zh": 25}, {"ordinary": 40, "candidate": 10})
check(REPLAY, {"en": 7, "zh": 6}, {"ordinary": 13})
check(DEPTH, {"en": 2, "zh": 1}, {"ordinary": 3})
