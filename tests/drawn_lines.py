"""The values of a line that matplotlib has drawn."""

import numpy as np
from matplotlib.lines import Line2D


def places(line: Line2D) -> np.ndarray:
    return np.asarray(line.get_xdata())


def heights(line: Line2D) -> np.ndarray:
    return np.asarray(line.get_ydata())
