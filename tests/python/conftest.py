from kt_kernel import _core


def pytest_report_header() -> str:
    """Which instruction sets this run covers natively: the others are only emulated here."""
    native = [variant for variant in _core.variants() if not variant.emulated]
    return "native: {}; emulated only: {}".format(
        " ".join(variant.name for variant in native if variant.runnable) or "none",
        " ".join(variant.name for variant in native if not variant.runnable) or "none",
    )
