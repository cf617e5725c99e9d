"""What the nano models share: data, tokenizer and the record of a model."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from moejax.training import Recipe

LANGUAGES = ("en", "zh")

# How often the documents of a source are read in one epoch, 1 by default: stories more often, since
# they teach a small model to write; formulas of statutes, speeches and bookings less.
MIXTURE = {
  "en_c4_train": 1.5,
  "en_tinystories": 2,
  "en_us_speeches": 0.5,
  "en_wikitext_valid": 2,
  "zh_cmrc2017_children": 2,
  "zh_cmrc2018_wiki": 1.5,
  "zh_cmrc2019_stories": 2,
  "zh_crosswoz": 0.5,
  "zh_law": 0.4,
  "zh_tinystories": 2,
}

# Fields of config.json that all have. <|endoftext|> is 0, between documents; BOS is not used.
COMMON = dict(
  vocab_size=6144,
  hidden_size=128,
  max_position_embeddings=1024,
  bos_token_id=None,
  eos_token_id=0,
  pad_token_id=2,
  hidden_act="silu",
  rope_theta=10000.0,
  tie_word_embeddings=False,
)


@dataclasses.dataclass(frozen=True)
class Nano:
  """A nano model.

  Attributes:
    name: it is loaded by.
    fields: of config.json.
    recipe: of its training.
    mixture, languages: of its text.
  """

  name: str
  fields: Mapping[str, Any]
  recipe: Recipe
  mixture: Mapping[str, float] = dataclasses.field(default_factory=lambda: MIXTURE)
  languages: tuple[str, ...] = LANGUAGES

  @property
  def family(self) -> str:
    return self.fields["model_type"]
