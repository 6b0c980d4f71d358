"""Figures for papers: boxes, lines and texts, written as SVG or PNG.

`shapes`     boxes, lines, texts, and the figure that holds them
`timeline_figure` draws a timeline as a figure
`deadlock`   draws what runs of a table until its ranks wait for each other
`curves`     draws curves on logarithmic axes as a figure
`svg`        writes a figure as SVG
`png`        writes a figure as PNG, with Pillow
`pdf`        writes a figure as PDF
"""
