"""SGLang with kt_kernel: is it right, and how fast beside kt-kernel 0.7.2. The rows are in ``rows.py``.

    python bench/sglang/run.py --out results.json                    stock SGLang of this interpreter, on its GPU
    python bench/sglang/run.py --out results.json --places p.json    also the fork, and kt-kernel 0.7.2 as the baseline
    python bench/sglang/run.py --out results.json --device cpu --rows eager "dropped expert"

--places names interpreters: {"stock": {"python": "/a/bin/python", "variables": {"PYTHONPATH": "..."}}, "fork": {...},
"original": {...}}. Rows of places that are not named are skipped, saying so. Engines of a model start together; each
is frozen until it is asked, so figures of all engines are taken in turns, in the same minutes, with the machine to
themselves. The file is written after every step.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

import checks
import rows as table
import server as http
from engines import Engine, EngineError, Place
from rows import INT4, LARGE, ORIGINAL, STOCK, TINY, Row

HERE = Path(__file__).parent
_ASK_SECONDS = 120
_LEAST_SECONDS = 20  # what is left to start something in


class Run:
    def __init__(self, given: argparse.Namespace, places: dict[str, Place]):
        self._given = given
        self._places = places
        self._end = time.monotonic() + given.seconds
        self._lock, self._conversion = threading.Lock(), threading.Lock()
        self._found: dict[str, dict] = {}
        self._read: dict[str, list[float]] = {}
        self._notes: list[str] = []
        self._started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        given.work.mkdir(parents=True, exist_ok=True)
        given.logs.mkdir(parents=True, exist_ok=True)

    # What is needed

    def prepare(self, model: str) -> None:
        folder = self._model(model)
        if (folder / "model.safetensors.index.json").exists():
            return
        if model == INT4:
            self._script("int4_model.py", STOCK, folder)
            return
        self._script("models.py", STOCK, folder, model)
        if model == TINY:
            self._script("models.py", STOCK, folder, "reference")

    def _script(self, name: str, place: str, *words) -> None:
        where = self._places.get(place, Place())
        command = [where.python, str(HERE / name), *map(str, words)]
        log = self._given.logs / f"{name}-{Path(str(words[-1])).name}.log"
        with open(log, "w") as file:
            limit = max(1, self._left())
            variables = where.environment(**plugin_variables(where, self._given.device))
            try:
                subprocess.run(command, env=variables, stdout=file, stderr=file, timeout=limit, check=True)
            except subprocess.SubprocessError:
                lines = log.read_text().strip().splitlines() or ["no output"]
                self._note(f"{name} {words[-1]} failed: {lines[-1]}")

    def _model(self, model: str) -> Path:
        return self._given.work / model

    def _weights(self, row: Row) -> Path:
        """int8 experts of the large model are those that kt-kernel 0.7.2 wrote, where it is there, for both sides."""
        model = self._model(row.model)
        if row.method != "AMXINT8" or row.model != LARGE or ORIGINAL not in self._places:
            return model
        converted = model.with_name(f"{row.model}-int8")
        with self._conversion:
            if not converted.is_dir():
                self._script("released_int8.py", ORIGINAL, model, converted, table.THREADS[row.model])
        return converted

    # Rows

    def group(self, models: list[str]) -> None:
        """All rows of some models: up, checked, measured in turns, ended."""
        engines: dict[str, Engine] = {}
        todo = [row for row in self._rows() if row.model in models]
        with ThreadPoolExecutor(self._given.at_once) as pool:
            ready = {model: pool.submit(self.prepare, model) for model in models}
            started = [(row, pool.submit(self._try, row, ready[row.model])) for row in todo]
            for row, future in started:
                if (engine := future.result()) is not None:
                    engines[row.name] = engine
        try:
            self._measure([row for row in todo if row.name in engines], engines)
        finally:
            with ThreadPoolExecutor(len(engines) or 1) as pool:
                list(pool.map(_end, engines.values()))

    def _rows(self) -> list[Row]:
        wanted = self._given.rows
        return [row for row in table.ROWS if wanted is None or row.name in wanted]

    def _try(self, row: Row, model: Future) -> Engine | None:
        """The engine of a row, up, checked and frozen; None where there is nothing more to ask."""
        model.result()
        reason = self._cannot(row)
        if reason:
            self._keep(row, status="skipped", reason=reason)
            return None
        for last in (False, True):
            try:
                return self._serve(row) if row.ends else self._bring_up(row)
            except Exception as error:  # of one row; the others go on
                if last or not lost_its_port(self._log(row)):
                    self._keep(row, status="failed", reason=f"{type(error).__name__}: {error}")
                    return None
                self._note(f"{row.name}: another engine took its port; started again")
        return None

    def _cannot(self, row: Row) -> str | None:
        place = self._places.get(row.place)
        if place is None:
            return f"no place is named {row.place}"
        if not (self._model(row.model) / "model.safetensors.index.json").exists():
            return f"{row.model} could not be made"
        if self._left() < _LEAST_SECONDS:
            return f"no time left of {self._given.seconds} s"
        return None

    def _bring_up(self, row: Row) -> Engine | None:
        start = time.monotonic()
        engine = Engine(
            self._places[row.place],
            self._options(row),
            self._log(row),
            **plugin_variables(self._places[row.place], self._given.device, row),
            **({checks.RECORDER_FOLDER: str(self._record_folder(row))} if row.recorded else {}),
        )
        try:
            about = engine.wait_until_up(min(self._given.start_seconds, self._left()))
            self._keep(row, status="up", about=about, start_seconds=round(time.monotonic() - start, 1))
            self._check(row, lambda call, **arguments: engine.call(call, _ASK_SECONDS, **arguments))
        except BaseException:
            engine.kill()
            raise
        if not row.figures:
            _end(engine)
            return None
        engine.freeze()
        return engine

    def _check(self, row: Row, ask) -> None:
        if row.model == LARGE:
            self._keep(row, status="ok")
            return
        reference = self._reference(row.model)
        if row.recorded:
            found = checks.check_recorded(ask, reference, self._record_folder(row), row.method)
        else:
            found = checks.check_engine(ask, reference, row.method)
        ok = row.right is None or found["ok"] == row.right
        self._keep(row, check=found, status="ok" if ok else "failed")
        if row.together:
            together = checks.check_together(ask, reference)
            self._keep(row, together=together, status="ok" if ok and together["ok"] else "failed")

    def _serve(self, row: Row) -> None:
        server = http.Server(
            self._places[row.place],
            self._options(row),
            self._log(row),
            **plugin_variables(self._places[row.place], self._given.device, row),
        )
        try:
            server.wait_until_up(min(self._given.start_seconds, self._left()))
            requests = http.check_requests(server, self._reference(row.model))
            end = http.check_end(server, row.ends)
        finally:
            server.kill()
        self._keep(row, requests=requests, end=end, status="ok" if requests["ok"] and end["ok"] else "failed")

    # Figures

    def _measure(self, measured: list[Row], engines: dict[str, Engine]) -> None:
        """Figure by figure, round by round, engine by engine. A round that warms up is left out."""
        wanted = self._given.figures
        figures = {
            figure.name: figure for row in measured for figure in row.figures if wanted is None or figure.call in wanted
        }
        for figure in figures.values():
            for number in range(figure.rounds + figure.warm_up):
                waits_for_memory = any(row.model == LARGE and figure in row.figures for row in measured)
                if waits_for_memory and number >= figure.warm_up and self._left() > 0:
                    self._read_bandwidth(figure)
                for row in measured:
                    if figure in row.figures and self._left() > 0:
                        self._take(row, engines[row.name], figure, warm_up=figure.warm_up and number == 0)
        for row in measured:
            self._keep(row, against=self._against(row))

    def _take(self, row: Row, engine: Engine, figure, warm_up: bool) -> None:
        engine.thaw()
        try:
            value = engine.call(figure.call, _ASK_SECONDS, **figure.arguments)
        except EngineError as error:
            self._note(f"{row.name}, {figure.name}: {error}")
            return
        finally:
            engine.freeze()
        if not warm_up:
            taken = self._found[row.name].setdefault("figures", {}).setdefault(figure.name, {"unit": figure.unit})
            taken["values"] = [*taken.get("values", []), round(value, 5)]
            taken["median"] = statistics.median(taken["values"])
            self._save()

    def _read_bandwidth(self, figure) -> None:
        """What memory gives in this round, while all engines are frozen: decoding a large model waits for it."""
        where = self._places.get(STOCK, Place())
        command = [where.python, str(HERE / "bandwidth.py"), str(table.THREADS[LARGE])]
        options = {"env": where.environment(), "capture_output": True, "text": True, "timeout": _ASK_SECONDS}
        try:
            ran = subprocess.run(command, check=True, **options)
        except (OSError, subprocess.SubprocessError) as error:  # figures are worth having without it
            self._note(f"read bandwidth before {figure.name}: {error}")
            return
        self._read.setdefault(figure.name, []).append(float(ran.stdout))

    def _against(self, row: Row) -> dict[str, float]:
        """How many times as fast as the baseline, for each figure."""
        theirs = self._found.get(row.baseline, {}).get("figures", {})
        ours = self._found[row.name].get("figures", {})
        ratios = {}
        for figure in row.figures:
            if figure.name in ours and figure.name in theirs:
                ratio = ours[figure.name]["median"] / (theirs[figure.name]["median"] or float("nan"))
                ratios[figure.name] = round(ratio if figure.more_is_better else 1 / ratio, 3)
        return ratios

    # Small things

    def _options(self, row: Row) -> dict:
        return row.engine_options(str(self._model(row.model)), str(self._weights(row)), self._given.device)

    def _log(self, row: Row) -> Path:
        return self._given.logs / f"{row.name.replace(' ', '-').replace(',', '')}.log"

    def _record_folder(self, row: Row) -> Path:
        return self._log(row).with_suffix(".record")

    def _reference(self, model: str) -> list[dict]:
        return json.loads((self._model(model) / "reference.json").read_text())

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        self._notes.append(text)
        self._save()

    def _keep(self, row: Row, **found) -> None:
        with self._lock:
            entry = self._found.setdefault(row.name, {"place": row.place, "model": row.model, "method": row.method})
            entry.update(found)
        print(f"{row.name}: {json.dumps(found)}", flush=True)
        self._save()

    def _save(self) -> None:
        with self._lock:
            content = {
                "part": "sglang",
                "date": self._started,
                "machine": {"cpus": os.cpu_count(), "kernel": platform.release()},
                "read_gbps": self._read,  # figure -> of each round
                "rows": {row.name: self._found[row.name] for row in table.ROWS if row.name in self._found},
                "notes": self._notes,
            }
            temporary = self._given.out.with_suffix(".tmp")
            temporary.write_text(json.dumps(content, indent=1) + "\n")
            temporary.replace(self._given.out)

    def failed(self) -> list[str]:
        return [name for name, found in self._found.items() if found.get("status") == "failed"]


def plugin_variables(place: Place, device: str, row: Row | None = None) -> dict[str, str]:
    """Folders of plugins that are needed come before what the place has on its path."""
    more = dict(row.variables) if row else {}
    folders = [str(HERE / "fault")] * ("KT_FAULT_DROP_EXPERT" in more)
    if device == "cpu":
        folders.append(str(HERE / "cpu_shim"))
        more |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    path = place.environment().get("PYTHONPATH")
    return {**more, "PYTHONPATH": os.pathsep.join([*folders, *([path] if path else [])])}


def lost_its_port(log: Path) -> bool:
    """SGLang chooses a free port and binds it later: engines that start together may choose the same."""
    return log.exists() and "EADDRINUSE" in log.read_text(errors="replace")


def _end(engine: Engine) -> None:
    engine.thaw()
    engine.stop()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the file of results")
    add("--places", type=Path, help="JSON: where the engines are")
    add("--rows", nargs="+", metavar="ROW", help="only these (default: all)")
    add("--figures", nargs="+", choices=table.CALLS, help="only these (default: all of each row)")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--work", type=Path, default=Path(tempfile.gettempdir(), "kt-sglang"), help="folder for models; kept")
    add("--logs", type=Path, help="folder for the logs of the engines (default: in --work)")
    add("--at-once", type=int, default=4, help="engines that start side by side")
    add(
        "--all-at-once",
        action="store_true",
        help="engines of both models live together: quicker, wants 100 GB of memory",
    )
    add("--start-seconds", type=float, default=240, help="for one engine to start")
    add("--seconds", type=float, default=3600, help="for everything")
    given = parser.parse_args()
    given.logs = given.logs or given.work / "logs"
    unknown = set(given.rows or ()) - {row.name for row in table.ROWS}
    if unknown:
        parser.error(f"no such rows: {', '.join(sorted(unknown))}; there are: {', '.join(r.name for r in table.ROWS)}")
    return given


def main() -> int:
    given = _parse()
    named = json.loads(given.places.read_text()) if given.places else {STOCK: {}}
    run = Run(given, {name: Place(**place) for name, place in named.items()})
    wanted = [row.model for row in table.ROWS if given.rows is None or row.name in given.rows]
    models = [model for model in (TINY, INT4, LARGE) if model in wanted]
    small = [model for model in models if model != LARGE]
    for group in [models] if given.all_at_once else [small, [LARGE] * (LARGE in models)]:
        run.group(group)
    return 1 if run.failed() else 0


if __name__ == "__main__":
    sys.exit(main())
