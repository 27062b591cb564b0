# Creates and reuses the virtual environments of the scripts. Sourced, never run.
#
# An environment is up to date if its stamp equals the fingerprint of everything that determines it:
# the packaging part of pyproject.toml, constraints.txt, the compiled sources, the extras, the Python
# version and the path of the checkout. The stamp is deleted before anything changes and written
# last, so an interrupted install is never taken for a complete one.
#
# The caller has `set -euo pipefail`. Sourcing changes the working directory to the root of the
# checkout.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$ROOT"
# PYTHONPATH and PYTHONHOME would let in packages from outside the environment.
unset PYTHONPATH PYTHONHOME
# pip does not compile an editable install. Without bytecode caches, each of the hundreds of processes
# of tests and benchmarks would compile the package again.
unset PYTHONDONTWRITEBYTECODE

say() { printf '==> %s\n' "$*" >&2; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# use_venv DIR EXTRAS: make sure that DIR is an environment with tinsmith and EXTRAS ("" for none), and
# set VENV_PYTHON to its interpreter. EXTRAS may be followed by a space and more requirements;
# only:REQUIREMENT means that package without tinsmith.
# A lock keeps two runs from installing into the same environment. Without flock (macOS), do not
# start two runs that install at the same time.
use_venv() {
  local dir="$1" extras="$2"
  VENV_PYTHON="$ROOT/$dir/bin/python"
  if _is_good "$dir" "$extras"; then
    say "environment $dir is up to date"
    return
  fi
  if command -v flock >/dev/null; then
    exec {_lock}>"$dir.lock"
    flock --nonblock "$_lock" || {
      say "another run is installing into $dir; waiting for it"
      flock "$_lock"
    }
    # The run that held the lock may have done the work already.
    _is_good "$dir" "$extras" || _install "$dir" "$extras"
    exec {_lock}>&-
  else
    _install "$dir" "$extras"
  fi
}

# Asks the environment's own interpreter for its version: if the underlying Python was removed or
# replaced, the environment fails or reports another version, and is created again.
_is_good() {
  local dir="$1" extras="$2" version
  [[ -f "$dir/stamp" ]] || return 1
  version="$(_version_of "$dir/bin/python")" || return 1
  [[ -z "${PYTHON:-}" || "$(_version_of "$PYTHON")" == "$version" ]] || return 1
  [[ "$(<"$dir/stamp")" == "$(_fingerprint "$extras" "$version")" ]]
}

_fingerprint() {
  local extras="$1" version="$2"
  {
    printf '%s\n' "$ROOT" "$extras" "$version"
    # pyproject.toml also has settings of linters and tests, which do not affect the install.
    awk '/^\[/ { keep = /^\[(build-system|project|tool\.hatch)/ } keep' pyproject.toml
    cat constraints.txt hatch_build.py src/tinsmith/engine/model/kernels/{*.[ch],library_path.py}
  } | git hash-object --stdin
}

_install() {
  local dir="$1" extras="$2" first wanted=() more python version
  read -r first more <<<"$extras"
  if [[ "$first" == only:* ]]; then wanted=("${first#only:}"); else wanted=(--editable ".${first:+[$first]}"); fi
  # Not quoted, because each word is a requirement.
  wanted+=($more)
  python="$(_find_python)"
  version="$(_version_of "$python")"
  # A stamped environment of the same Python is complete: updating it takes seconds, a new one takes
  # minutes. Anything else is recreated.
  if [[ -f "$dir/stamp" && "$(_version_of "$dir/bin/python")" == "$version" ]]; then
    say "updating $dir, because its requirements have changed"
    rm -f "$dir/stamp"
  else
    say "creating environment $dir with Python $version ($python)"
    rm -rf "$dir"
    "$python" -m venv "$dir"
  fi
  say "installing ${wanted[*]} as pinned in constraints.txt; the first time takes minutes"
  # A variable instead of an option, so that the pins also apply to the build backend.
  PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 \
    "$dir/bin/python" -m pip install --progress-bar off "${wanted[@]}" | _show_install
  _fingerprint "$extras" "$version" >"$dir/stamp.new"
  mv "$dir/stamp.new" "$dir/stamp"
  say "environment $dir is ready"
}

# Reads what pip prints, and shows each package as it comes. Not in awk: some read ahead, and show
# nothing for minutes.
_show_install() {
  local line name size count=0 commas
  while IFS= read -r line; do
    read -r line <<<"$line" # strip leading spaces
    case "$line" in
      *.metadata\ * | *.metadata) ;;
      Downloading\ *.whl* | Using\ cached\ *.whl* | Processing\ *.whl* | *.tar.gz\ \(*)
        name="${line#Using }"
        read -r _ name _ <<<"$name"
        name="${name##*/}"
        size="${line##*(}"
        [[ "$line" == *[kM]B\) ]] && size=" (${size%)})" || size=""
        count=$((count + 1))
        [[ "$name" =~ ^([^-]+-[^-]+)-.*\.whl$ ]] && name="${BASH_REMATCH[1]}"
        printf '    %3d  %s%s\n' "$count" "$name" "$size"
        ;;
      Installing\ build\ dependencies*started*) printf '    fetching the build tools\n' ;;
      *editable*metadata*started*) printf '    compiling the kernels of the engine\n' ;;
      *still\ running...) printf '    still running\n' ;;
      Installing\ collected\ packages:*)
        commas="${line//[^,]/}"
        printf '    installing %d packages; this takes about a minute\n' "$((${#commas} + 1))"
        ;;
    esac
  done >&2
}

# Runs each candidate: version managers leave shims for Pythons that are not installed.
_find_python() {
  local candidate path
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3.14 python3 python; do
    path="$("$candidate" -c '
import ensurepip, sys, venv
if sys.version_info < (3, 11):
    sys.exit(1)
print(sys.executable)' 2>/dev/null)" && [[ -n "$path" ]] && {
      printf '%s\n' "$path"
      return
    }
    [[ "$candidate" != "${PYTHON:-}" ]] ||
      die "PYTHON=$PYTHON is not a working Python >= 3.11 with venv; correct it, or unset it"
  done
  die "no Python >= 3.11 with the venv module was found; install one, or set PYTHON to its path"
}

_version_of() {
  "$1" -c 'import platform; print(platform.python_implementation(), platform.python_version())' \
    2>/dev/null
}
