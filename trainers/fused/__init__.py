"""The Llama layer with its backward written by hand, and the kernels that it calls.

Not named `kernels`: that is a package of Hugging Face, which transformers imports where it is installed.
"""
