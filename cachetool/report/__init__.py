"""A picture of a cache: one page of HTML that needs nothing else, made by ``cachetool stats --html``."""

from cachetool.report.numbers import Figures, figures
from cachetool.report.page import page

__all__ = ["Figures", "figures", "page"]
