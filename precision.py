"""The library as the command and tasks see it: `from precision import Precision, recipe`."""

from lowprec.precision import SITES, Precision, Recipe, Refused, Site, View, recipe

__all__ = ["SITES", "Precision", "Recipe", "Refused", "Site", "View", "recipe"]
