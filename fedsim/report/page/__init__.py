"""The report as one HTML page that needs no network.

    page        puts it together
    facts       what the runs are: data, sizes, seeds, how their configs differ, where their folders are
    curves_data the curves as JSON, for page.js to draw
    sorting     the numbers in table cells by which the page sorts rows

page.html.j2, page.css and page.js are written into the page, and so is plotly.js (from the package plotly, 4.8 MB).
"""
