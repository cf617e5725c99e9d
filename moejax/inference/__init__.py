"""Running a model: prefill, decode, greedy generation, teacher-forced scoring."""

from moejax.inference.batches import pad
from moejax.inference.forward import decode, forward, prefill
from moejax.inference.generate import continue_greedily, generate, Generation, greedy
from moejax.inference.score import Score, score
