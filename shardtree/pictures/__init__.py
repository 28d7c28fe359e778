"""Pictures of layouts, meshes, lenses, plans and series: immutable values, and their texts, SVG and HTML."""

from ._display import draw, write_text
from ._flows import factory_picture, lens_picture, trace_picture
from ._html import details_html, element_html, figure_html, html_page, page_of, table_html, text_html
from ._layouts import layout_picture, mesh_picture, shard_picture, stored_picture, tree_picture
from ._picture import TONES, Bar, Bars, Block, Cell, Entry, Flow, Line, Moment, Panel, Picture, Plane, Stream
from ._plans import plan_picture, schedule_picture
from ._series import moment_text, series_picture
from ._style import COLOURS
from ._svg import svg_of
from ._text import Span, Spans, cell_lines, picture_lines, text_of

__all__ = [
    "Bar",
    "Bars",
    "Block",
    "Cell",
    "Entry",
    "Flow",
    "Line",
    "Moment",
    "Picture",
    "Plane",
    "Stream",
    "layout_picture",
    "svg_of",
    "text_of",
]
