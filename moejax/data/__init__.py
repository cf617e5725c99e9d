"""Text and questions: corpora on disk, and the project's own evaluation set."""

from moejax.data.corpus import Document, read_corpus, read_documents, read_objects
from moejax.data.evaluation import passages, questions, SPLITS, Windows, windows
from moejax.data.questions import Question, read_questions
