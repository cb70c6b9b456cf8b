"""Executes the notebooks, top to bottom: `python colab/execute.py [NAME ...]`.

Each gets a kernel and an empty folder of its own; the first error ends the run, with
the cell and its traceback. Needs the extra `colab` (and `aot` for tpu_aot).

  --output FOLDER   writes the executed notebooks there
  --store           writes them in place, cleaned: what the repository keeps
"""

import argparse
import pathlib
import tempfile
import time

import nbclient
import nbformat

HERE = pathlib.Path(__file__).resolve().parent
TIMEOUT = 1800  # seconds a cell; a busy machine is slow
WIDGET = 'application/vnd.jupyter.widget-view+json'


def execute(notebook: nbformat.NotebookNode) -> None:
  """Runs a notebook in place.

  Raises:
    nbclient.exceptions.CellExecutionError: a cell failed.
  """
  with tempfile.TemporaryDirectory() as folder:
    nbclient.NotebookClient(
      notebook,
      timeout=TIMEOUT,
      kernel_name='python3',
      coalesce_streams=True,
      resources={'metadata': {'path': folder}},
    ).execute()


def clean(notebook: nbformat.NotebookNode) -> None:
  """Drops what is the machine's (times, versions, warnings), and widgets.

  A widget shows nothing without a kernel.
  """
  notebook.metadata = {
    key: notebook.metadata[key] for key in ('kernelspec', 'language_info', 'colab')
  }
  notebook.metadata.language_info = {'name': 'python'}
  for cell in notebook.cells:
    cell.metadata.pop('execution', None)  # when it ran
    if cell.cell_type == 'code':
      cell.outputs = [
        output
        for output in cell.outputs
        if WIDGET not in output.get('data', {}) and output.get('name') != 'stderr'
      ]


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
  parser.add_argument('names', nargs='*', help='of notebooks; default: all')
  parser.add_argument('--output', type=pathlib.Path, help='folder for the results')
  parser.add_argument('--store', action='store_true', help='keep the outputs')
  options = parser.parse_args()
  names = options.names or sorted(path.stem for path in HERE.glob('*.ipynb'))
  if options.output is not None:
    options.output.mkdir(parents=True, exist_ok=True)
  for name in names:
    path = HERE / f'{pathlib.Path(name).stem}.ipynb'
    notebook = nbformat.read(path, as_version=4)
    begin = time.perf_counter()
    try:
      execute(notebook)
    finally:  # as far as it came
      if options.output is not None:
        nbformat.write(notebook, options.output / path.name)
    print(f'{path.stem}: {time.perf_counter() - begin:.0f} s', flush=True)
    if options.store:
      clean(notebook)
      nbformat.write(notebook, path)


if __name__ == '__main__':
  main()
