"""Running a model: prefill, decode, generation, scoring, substitution of states."""

from moejax.inference.batches import pad
from moejax.inference.forward import decode, forward, prefill
from moejax.inference.generate import continue_greedily, generate, Generation, greedy
from moejax.inference.score import Score, score
from moejax.inference.substitute import difference, num_differing, substitute
