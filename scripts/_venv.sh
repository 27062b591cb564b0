# Makes and reuses the virtual environments of the scripts. Sourced, never run.
#
# An environment is good when its stamp equals the fingerprint of everything it was made from: the
# packaging half of pyproject.toml, constraints.txt, what is compiled, the extras, the Python version
# and the place of the checkout. The stamp is taken away before anything changes and written last, so
# an interrupted install is never mistaken for a good one.
#
# The caller has `set -euo pipefail`; afterwards the working directory is the root of the checkout.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$ROOT"
# A stray PYTHONPATH or PYTHONHOME would let packages from outside into the environment.
unset PYTHONPATH PYTHONHOME
# We run from our sources, which pip does not compile: where Python may not keep what it compiles,
# each of the hundreds of processes of tests and benchmarks would compile them anew.
unset PYTHONDONTWRITEBYTECODE

say() { printf '==> %s\n' "$*" >&2; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# use_venv DIR EXTRAS: leave a good environment in DIR, holding tinsmith with EXTRAS ("" for none).
# EXTRAS of the form only:REQUIREMENT stands for that package without tinsmith. After a space EXTRAS
# may name further requirements.
# After it VENV_PYTHON is the environment's interpreter. The lock keeps two runs from installing into
# one environment; where there is no flock (macOS), runs must not overlap while installing.
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
    # Whoever held the lock may have done the work already.
    _is_good "$dir" "$extras" || _install "$dir" "$extras"
    exec {_lock}>&-
  else
    _install "$dir" "$extras"
  fi
}

# The environment's own interpreter is asked for its version: if the Python below it was removed or
# replaced, the environment does not run, or says another version, and is made again.
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
    # Settings of linters and tests live in pyproject.toml too and change nothing that is installed.
    awk '/^\[/ { keep = /^\[(build-system|project|tool\.hatch)/ } keep' pyproject.toml
    cat constraints.txt hatch_build.py src/tinsmith/model/kernels/{*.[ch],names.py}
  } | git hash-object --stdin
}

_install() {
  local dir="$1" extras="$2" first wanted=() more python version
  read -r first more <<<"$extras"
  if [[ "$first" == only:* ]]; then wanted=("${first#only:}"); else wanted=(--editable ".${first:+[$first]}"); fi
  # Not quoted: each word of it is a requirement.
  wanted+=($more)
  python="$(_find_python)"
  version="$(_version_of "$python")"
  # A stamped environment of the same Python was once whole: bringing it up to date takes seconds
  # where a new one takes minutes. Anything else is made from nothing.
  if [[ -f "$dir/stamp" && "$(_version_of "$dir/bin/python")" == "$version" ]]; then
    say "what $dir is made from has changed; updating it"
    rm -f "$dir/stamp"
  else
    say "making environment $dir with Python $version ($python)"
    rm -rf "$dir"
    "$python" -m venv "$dir"
  fi
  say "installing ${wanted[*]} as pinned in constraints.txt; the first time takes minutes"
  # By variable, not by option: so the pins hold for the build backend too.
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
    read -r line <<<"$line" # without the spaces before it
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

# Each candidate is run, not just looked up: a version manager leaves shims for Pythons it has not.
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
