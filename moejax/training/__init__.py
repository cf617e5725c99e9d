"""Training of the nano models: token stream, recipe, step, loop and export."""

from moejax.training.loop import Progress, Run, train
from moejax.training.recipe import Recipe
from moejax.training.stream import make_stream, TokenStream
