"""One module for each agent framework; each needs its extra, e.g. `pip install 'weft[langchain]'`."""
