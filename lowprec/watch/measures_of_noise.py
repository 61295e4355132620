"""What findings.py judges of the noise of stochastic rounding; see measures.py."""

import math

from .faults import Figure


class NoiseOfWrites:
    """Measures of the noise of one kind of writes. of: "weight" or "moment"."""

    def __init__(self, of):
        self.of = of
        self.words = {} if of == "weight" else {"moment": "exp_avg_sq"}

    def _error(self, one):
        """The errors of a tensor that is written by chance; None for others."""
        if not one.seen.by_chance:
            return None
        error = one.error if self.of == "weight" else one.moment_error
        if error.far > 0.01 * error.entries:
            return None
        nearest = error.to_nearest
        if nearest is None:
            nearest = self._all(one.seen).to_nearest is not False
        return None if nearest else error

    def _all(self, seen):
        return seen.watch.errors if self.of == "weight" else seen.watch.moment_errors

    def in_lumps(self, one):
        """all entries of a tensor err together, beyond 6 standard errors"""
        error = self._error(one)
        if error is None or not error.lumps:
            return None
        alternates = abs(error.score) < 0.5 * math.sqrt(error.burst * error.variance)
        return Figure(1.0, {**self.words}) if alternates else None

    def biased(self, one):
        """mean error over the wanted steps, where it is certain"""
        error = self._error(one)
        if error is None:
            return None
        side = "away from" if error.bias > 0 else "toward"
        mean = abs(error.score) / max(1.0, error.entries)
        return Figure(abs(error.bias), {**self.words, "side": side, "mean": mean})

    def repeated(self, one):
        """correlation of the errors of two looks, where it is certain"""
        error = self._error(one)
        return None if error is None else Figure(error.repeats, {**self.words, "value": error.repeats})

    def of_neighbours(self, one):
        """correlation of the errors of neighbours, where it is certain"""
        error = self._error(one)
        if error is None:
            return None
        return Figure(error.neighbours, {**self.words, "value": error.neighbours})

    def shared(self, seen):
        """correlation of the errors of two tensors, where it is certain"""
        errors = self._all(seen)
        if not seen.by_chance or errors.to_nearest is not False:
            return
        for (a, b), value in errors.shares().items():
            yield Figure(value, {**self.words, "other": seen.names[a], "value": value}, seen.names[b])
