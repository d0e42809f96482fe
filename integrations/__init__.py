"""One package for each agent framework. LangChain and AutoGen are extras, as in `pip install 'weft[langchain]'`."""
