class UserError(ValueError):
    """Something that whoever runs ``kt`` can put right. Its message is one line, and says how."""
