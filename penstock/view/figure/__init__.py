"""Figures for papers: shapes with places and colours, and what puts them on paper.

`shapes`     boxes, lines and texts, and a figure made of them
`timeline`   a timeline as a figure
`curves`     curves over a logarithmic axis as one
`svg`        a figure as SVG
`png`        a figure as PNG, painted with Pillow
"""
