"""Extensions of Sphinx that this site is made with."""
