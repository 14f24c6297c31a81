class Phrase:
    """A text with {names} and their values, so that ``kt`` can say it in another language."""

    def __init__(self, text: str, /, **values: object):
        self.text, self.values = text, values

    def __str__(self) -> str:
        return self.text.format(**self.values) if self.values else self.text


class UserError(ValueError):
    """Something that whoever runs ``kt`` can put right. Its message is one line, and says how."""

    def __init__(self, text: str, /, **values: object):
        self.phrase = Phrase(text, **values)
        super().__init__(str(self.phrase))
