"""All of Weft's imports of vLLM, the members of vLLM that Weft uses, and checks that the installed vLLM has them."""
