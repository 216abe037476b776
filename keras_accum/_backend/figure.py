"""Figures, which matplotlib draws if it is installed."""

from typing import Any


def new_figure(of: str, size: tuple[float, float]) -> tuple[Any, Any]:
    """An empty figure, and its axis.

    Args:
        of: what is drawn, as users call it: `of.plot()`.
        size: width and height, in inches.

    Raises:
        ImportError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"`{of}.plot()` draws with matplotlib, which is not installed: `pip install "
            f"matplotlib`. `print({of})` shows the same as a table."
        ) from error
    figure = Figure(figsize=size, layout="constrained")
    axis = figure.add_subplot()
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis
