"""The report for a browser: `write` gathers the rows, `encoding` packs them, `plots` draws; the rest is the page."""
