# A function for the scripts in this folder.
every() { # SECONDS COMMAND...: runs COMMAND every SECONDS in a background process, whose id is then in `$!`
  # Wait by reading an empty pipe: a `sleep` would outlive the loop and hold the output open.
  (exec 7<> <(:); while ! read -rt "$1" -u 7; do "${@:2}"; done) &
}
