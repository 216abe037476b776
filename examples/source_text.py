"""The standard library's own sources as texts to model, byte by byte, in padded batches.

Every Python has them, so nothing is downloaded; another version has other sources.
"""

import itertools
import re
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

# Long modules in plain Python, there in every supported version.
MODULES = ["argparse", "tarfile", "inspect", "typing", "doctest", "mailbox", "optparse"]
HELD_OUT = "difflib"
# Bytes that no source text has: padding, the start of a text and its end.
PADDING, START, END = 0, 2, 3

Batch = tuple[np.ndarray, np.ndarray]


def read_texts(module: str, max_length: int) -> list[bytes]:
    """Cut a module of the standard library into paragraphs, definitions and what fits."""
    path = Path(sysconfig.get_paths()["stdlib"], f"{module}.py")
    if not path.is_file():
        raise SystemExit(
            f"No file {path}: the texts are the standard library's own sources. Use a "
            "Python that was installed with them; one in a zip file is not enough."
        )
    parts = re.split(r"\n\s*\n|\n(?=[ ]*(?:def|class) )", path.read_text("utf-8"))
    texts = [textwrap.dedent(part).strip("\n").encode() + b"\n" for part in parts]
    starts = [(text, i) for text in texts for i in range(0, len(text), max_length)]
    return [text[i : i + max_length] for text, i in starts]


def make_batch(texts: Sequence[bytes]) -> Batch:
    """Pad texts to the longest, with each byte's predecessor as the input before it."""
    padded = np.full((len(texts), 2 + max(map(len, texts))), PADDING, "int32")
    for row, text in zip(padded, texts, strict=True):
        row[: len(text) + 2] = [START, *text, END]
    # The input has no END: where the target ends, its mask does.
    return np.where(padded == END, PADDING, padded)[:, :-1], padded[:, 1:]


def batches(texts: Sequence[bytes], tokens: int, seed: int) -> Iterator[Batch]:
    """Shuffle forever; a batch is full as soon as it holds so many tokens."""
    random = np.random.default_rng(seed)
    order = (texts[i] for _ in itertools.count() for i in random.permutation(len(texts)))
    while True:
        chosen, held = [], 0
        while held < tokens:
            chosen.append(next(order))
            held += len(chosen[-1]) + 1
        yield make_batch(chosen)


def as_dataset(make: Callable[[], Iterator[Batch]], size: int) -> tf.data.Dataset:
    """Wrap a generator of `size` batches, whose numbers of texts and lengths vary."""
    spec = tf.TensorSpec((None, None), tf.int32)
    dataset = tf.data.Dataset.from_generator(make, output_signature=(spec, spec))
    return dataset.apply(tf.data.experimental.assert_cardinality(size))


def entropy(texts: Sequence[bytes]) -> float:
    """Return the bits per byte of the best code that looks at single bytes only."""
    counts = np.bincount(np.frombuffer(b"".join(texts), "uint8"))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())
