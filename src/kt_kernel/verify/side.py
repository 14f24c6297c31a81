"""What ``kt verify`` computes, in a process of its own: a kernel that kills its process then is a finding."""

from pathlib import Path


class VerifySide:
    """Answers the requests of ``kt_kernel.bench.client``; every public method is one."""

    def kernels(self, weight_format: str, variants: list[str], quick: bool) -> list[dict]:
        from kt_kernel.verify.kernels import check_format

        return check_format(weight_format, variants, quick)

    def slices(self, formats: list[str]) -> list[dict]:
        from kt_kernel.verify.gpu_slices import check_slices

        return [check_slices(weight_format) for weight_format in formats]

    def layer(self, path: str, layer_idx: int | None, method: str, threads: int | None) -> dict:
        from kt_kernel.verify.model_layer import check_layer

        return check_layer(Path(path), layer_idx, method, threads)

    def model(self, path: str, method: str, tokens: int, threads: int | None, trust_remote_code: bool) -> dict:
        from kt_kernel.verify.whole_model import NotMeasuredError, compare

        try:
            return compare(Path(path), method, tokens, threads, trust_remote_code)
        except NotMeasuredError as error:
            return {"skipped": str(error)}
