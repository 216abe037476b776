"""The TFDS builder of the digits data set.

It lives in a package folder of its own because TFDS looks for the folder of a
builder's package: the same class in a script or in a plain module fails.
"""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import tensorflow_datasets as tfds
from sklearn.datasets import load_digits

_DESCRIPTION = """\
Handwritten digits as 8 x 8 images with integer values from 0 to 16.

These are the 1,797 images that scikit-learn carries in its own wheel: the test part of
"Optical Recognition of Handwritten Digits" (UCI), written by 13 people. Every fifth
image of each class is a test image: 1,442 images train and 355 test. The split draws no
random number, so it is the same everywhere. The same writers occur in both parts, so
the test accuracy says nothing about new writers.
"""

_CITATION = """\
@misc{alpaydin1998optical,
  author = {Alpaydin, E. and Kaynak, C.},
  title = {Optical Recognition of Handwritten Digits},
  year = {1998},
  publisher = {UCI Machine Learning Repository},
  doi = {10.24432/C50P49}
}
@article{pedregosa2011scikit,
  author = {Pedregosa, F. and others},
  title = {Scikit-learn: Machine Learning in {P}ython},
  journal = {Journal of Machine Learning Research},
  volume = {12},
  pages = {2825--2830},
  year = {2011}
}
"""

TEST_EVERY = 5


def is_test(labels: np.ndarray) -> np.ndarray:
    """Mark every fifth image of each class; returns booleans, shape of `labels`."""
    rank_in_class = np.empty_like(labels)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        rank_in_class[members] = np.arange(len(members))
    return rank_in_class % TEST_EVERY == TEST_EVERY - 1


class Builder(tfds.core.GeneratorBasedBuilder):
    """`image`: uint8 of shape (8, 8, 1), values 0 to 16; `label`: the digit."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar[dict[str, str]] = {"1.0.0": "First release."}

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            description=_DESCRIPTION,
            features=tfds.features.FeaturesDict(
                {
                    # A Tensor, not an Image: nothing here needs a PNG decoder.
                    "image": tfds.features.Tensor(shape=(8, 8, 1), dtype=np.uint8),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://archive.ics.uci.edu/dataset/80",
            citation=_CITATION,
            license="BSD-3-Clause (scikit-learn); original data: see the homepage",
            # TFDS would shuffle on disk by a hash of the keys; the order in the files
            # is the order that scikit-learn documents.
            disable_shuffling=True,
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[tuple[int, dict[str, object]]]]:
        del dl_manager  # nothing to download
        digits = load_digits()
        images = digits.images.astype(np.uint8)[..., np.newaxis]
        test = is_test(digits.target)
        return {
            "train": self._generate_examples(images[~test], digits.target[~test]),
            "test": self._generate_examples(images[test], digits.target[test]),
        }

    def _generate_examples(
        self, images: np.ndarray, labels: np.ndarray
    ) -> Iterator[tuple[int, dict[str, object]]]:
        for key, (image, label) in enumerate(zip(images, labels, strict=True)):
            yield key, {"image": image, "label": int(label)}
