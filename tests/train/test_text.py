from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from xlashard.train.data import Corpus, read_corpus
from xlashard.train.settings import DataSettings
from xlashard.train.text import Text, in_file, in_memory

PIECES = st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=6)


@given(PIECES, st.data())
def test_windows_are_those_of_the_joined_bytes(pieces: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(pieces)
    begin = data.draw(st.integers(0, len(whole) - 1))
    end = data.draw(st.integers(begin + 1, len(whole)))
    size = data.draw(st.integers(1, end - begin))
    starts = data.draw(st.lists(st.integers(0, end - begin - size), max_size=5))
    text = Text.joined([in_memory(piece) for piece in pieces]).part(begin, end)
    found = text.windows(np.array(starts, np.int64), size)
    part = whole[begin:end]
    assert found.shape == (len(starts), size)
    assert [row.tobytes() for row in found] == [part[start : start + size] for start in starts]
    assert text.tobytes() == part


def test_files_are_mapped_and_not_read(tmp_path: Path) -> None:
    # A file with a hole of 1 TiB: whoever reads it whole does not come back.
    path = tmp_path / "long.txt"
    with path.open("wb") as file:
        file.write(b"a" * (1 << 16))
        file.seek(1 << 40)
        file.write(b"the end")
    text = Text.joined([in_memory(b"before "), in_file(path)])
    assert len(text) == (1 << 40) + 14
    assert text.windows(np.array([5, len(text) - 7]), 7).tobytes() == b"e aaaaathe end"
    corpus = read_corpus(DataSettings((str(path),), 0.25), 8)
    assert len(corpus.train) + len(corpus.held_out) == (1 << 40) + 7
    assert corpus.held_out.windows(np.array([len(corpus.held_out) - 7]), 7).tobytes() == b"the end"
    assert "bytes, " in corpus.mark


def test_another_text_has_another_mark() -> None:
    def mark(train: bytes, held_out: bytes) -> str:
        texts = (Text.joined([in_memory(text)]) for text in (train, held_out))
        return Corpus(*texts, source="").mark

    one = mark(b"x" * 500, b"y" * 100)
    assert one == mark(b"x" * 500, b"y" * 100)
    assert len({one, mark(b"x" * 499, b"y" * 101), mark(b"x" * 499 + b"z", b"y" * 100)}) == 3
