"""A Hugging Face release: what it holds beside tensors, and its tensors as the tables see them."""
