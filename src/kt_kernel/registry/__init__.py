"""Which models there are: known ones, those that a user added, and how a name finds them."""
