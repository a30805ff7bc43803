"""Figures for papers: PNG of 300 dpi, and PDF as wide as a column or a page.

plot        a figure, its caption and its files; sizes and fonts
frames      axes of panels, legends, labels at the ends of lines
accuracy    accuracy against rounds, bytes, samples and time
over_rounds participation and coverage, a strip of colour per method
selections  who was selected: clients by rounds, and how often
time        seconds by phase
partitions  samples by client and label
collection  all of them
"""
