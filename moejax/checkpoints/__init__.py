"""Checkpoints in the layout of Hugging Face, in and out, and the state of training runs."""

from moejax.checkpoints.load import load, LoadedModel, save, shipped
from moejax.checkpoints.tokenizer import Tokenizer
from moejax.checkpoints.training import restore_latest, save_training
from moejax.checkpoints.weights import load_params, save_params
