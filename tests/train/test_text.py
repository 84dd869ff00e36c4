from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlashard.train.config.settings import DataSettings
from xlashard.train.data import Corpus, Text, in_memory, read_corpus, tokens_in_file
from xlashard.train.errors import DataError

PIECES = st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=6)


@pytest.mark.slow
@given(PIECES, st.data())
def test_windows_equal_slices_of_the_joined_bytes(pieces: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(pieces)
    begin = data.draw(st.integers(0, len(whole) - 1))
    end = data.draw(st.integers(begin + 1, len(whole)))
    size = data.draw(st.integers(1, end - begin))
    starts = data.draw(st.lists(st.integers(0, end - begin - size), max_size=5))
    text = Text.joined([in_memory(piece) for piece in pieces]).part(begin, end)
    rows = text.windows(np.array(starts, np.int64), size)
    part = whole[begin:end]
    assert rows.shape == (len(starts), size)
    assert [row.tobytes() for row in rows] == [part[start : start + size] for start in starts]
    assert text.tobytes() == part


def test_text_files_are_memory_mapped(tmp_path: Path) -> None:
    # A file with a hole of 1 TiB: reading it whole would never return.
    path = tmp_path / "long.txt"
    with path.open("wb") as file:
        file.write(b"a" * (1 << 16))
        file.seek(1 << 40)
        file.write(b"the end")
    text = Text.joined([in_memory(b"before "), np.memmap(path, np.uint8, mode="r")])
    assert len(text) == (1 << 40) + 14
    assert text.windows(np.array([5, len(text) - 7]), 7).tobytes() == b"e aaaaathe end"
    corpus = read_corpus(DataSettings((str(path),), 0.25), 8)
    assert len(corpus.train) + len(corpus.held_out) == (1 << 40) + 7
    assert corpus.held_out.windows(np.array([len(corpus.held_out) - 7]), 7).tobytes() == b"the end"
    assert "bytes, " in corpus.mark


def test_mark_is_equal_only_for_equal_texts() -> None:
    def mark(train: bytes, held_out: bytes) -> str:
        texts = (Text.joined([in_memory(text)]) for text in (train, held_out))
        return Corpus(*texts, source="").mark

    one = mark(b"x" * 500, b"y" * 100)
    assert one == mark(b"x" * 500, b"y" * 100)
    assert len({one, mark(b"x" * 499, b"y" * 101), mark(b"x" * 499 + b"z", b"y" * 100)}) == 3


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_token_files_are_memory_mapped_and_keep_the_dtype(tmp_path: Path, suffix: str) -> None:
    numbers = np.arange(1000, 2000, dtype=np.uint32)
    write = numbers.tofile if suffix == ".bin" else lambda path: np.save(path, numbers)
    for name in ("a", "b"):
        write(tmp_path / f"{name}{suffix}")
    data = DataSettings((str(tmp_path),), 0.5, "uint32")
    corpus = read_corpus(data, 8, vocab=2000)
    assert (len(corpus.train), len(corpus.held_out), corpus.unit) == (1000, 1000, "tokens")
    window = corpus.train.windows(np.array([3, 990]), 9)
    assert window.dtype == np.uint32
    np.testing.assert_array_equal(window[0], np.arange(1003, 1012))
    assert "tokens, " in corpus.mark


def test_a_token_outside_of_the_vocabulary_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(500, dtype=np.uint16).tofile(path)
    text = Text.joined([tokens_in_file(path, "uint16")], below=300)
    assert text.windows(np.array([0]), 300).max() == 299
    with pytest.raises(DataError, match=r"token 300, .*model.vocab = 300") as caught:
        text.windows(np.array([0]), 301)
    assert "vocab = 301" in str(caught.value)


def test_files_of_an_invalid_token_format_are_reported(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(DataError) as caught:
            tokens_in_file(path, "uint32")
        return str(caught.value)

    (tmp_path / "odd.bin").write_bytes(b"12345")
    assert "has 5 bytes, but tokens of type uint32 take 4 each" in refusal(tmp_path / "odd.bin")
    np.save(tmp_path / "wide.npy", np.zeros((2, 3), np.int64))
    assert "has int64[2, 3]" in refusal(tmp_path / "wide.npy")
    (tmp_path / "text.npy").write_text("no numbers")
    assert "is not a numeric .npy file" in refusal(tmp_path / "text.npy")
    with pytest.raises(DataError, match="data.tokens = 'uint16'.* data.paths"):
        read_corpus(DataSettings(tokens="uint16"), 8)
