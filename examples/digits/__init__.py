"""scikit-learn's handwritten digits as a TFDS data set: 1,797 images, no network."""

from .digits_dataset_builder import Builder as Builder
