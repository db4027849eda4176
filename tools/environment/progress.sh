# Sourced by the scripts beside it.
every() { # SECONDS COMMAND...: runs COMMAND every so often, in a background process, which `$!` names
  # An empty pipe is waited at, not `sleep`, which would outlive the loop and hold the output open.
  (exec 7<> <(:); while ! read -rt "$1" -u 7; do "${@:2}"; done) &
}
