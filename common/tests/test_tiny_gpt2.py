"""The tiny GPT-2's files agree with the corpus and the figures that they were made from."""

import json

from task7.inference import TINY_FOLDER
from task7.tiny_gpt2.corpus import words
from task7.tiny_gpt2.train import with_figures


def test_words_are_those_of_the_corpus() -> None:
    assert (TINY_FOLDER / "words.txt").read_text(encoding="utf-8") == words()


def test_the_page_has_the_figures_of_the_training() -> None:
    figures = json.loads((TINY_FOLDER / "training.json").read_text())
    page = (TINY_FOLDER / "README.md").read_text(encoding="utf-8")
    size = int(page.split("| files | ")[1].split(" bytes")[0].replace(",", ""))
    assert with_figures(page, figures, size) == page
