#!/usr/bin/env bash
# Exports the observations, looks for drift, and retrains where it is due: one turn of the loop, for cron.
#
#   GPUMEMNET_REGISTRY      the registry's folder, which must exist
#   GPUMEMNET_DATABASE_URL  where the service keeps its observations
#   RETRAIN_FOLDER          work folder: finished steps, reports, log (/var/lib/gpumemnet/retrain)
#   RETRAIN_SINCE           leave older observations out; set it when the driver changes, such as 2026-01-31T12:00:00Z
#   RETRAIN_METRICS         file for node_exporter's textfile collector, ending in .prom
#   PYTHON                  the Python that gpumemnet[service,train] is installed for (python3)
#
# Arguments go to `gpumemnet retrain`, such as --without-promotion or --dry-run.
#
# Exit code: 0 promoted, 10 nothing to do or nothing better, 2 something to mend, 1 a failure, or another turn is still at work.
# It prints, and so cron mails, when something was promoted or went wrong.  RETRAIN_FOLDER/retrain.log has a line for every turn,
# RETRAIN_FOLDER/last-turn.txt all that the last one's commands said.
set -uo pipefail

readonly python=${PYTHON:-python3} folder=${RETRAIN_FOLDER:-/var/lib/gpumemnet/retrain}
said=/dev/null  # until this turn has a file of its own

end() {  # CODE SENTENCE: the turn's line in the log and in syslog, and what cron is to mail
  local line
  line="$(date -u +%Y-%m-%dT%H:%M:%SZ) $1 $2"
  [[ $said == /dev/null ]] || echo "$line" >> "$folder/retrain.log"
  logger -t gpumemnet-retrain -- "$1 $2" 2>/dev/null
  if (($1 != 10)); then
    echo "$line"
    (($1 == 0)) || tail -n 20 "$said"
  fi
  exit "$1"
}

failed() {  # CODE WHAT: ends the turn for a command that did not do what it should
  case $1 in
    2) end 2 "$2: something to mend" ;;
    126 | 127) end 2 "$2: $python cannot be run: name the Python of gpumemnet's installation in PYTHON" ;;
    *) end 1 "$2: failed with exit code $1; the champion is as it was, and the next turn goes on" ;;
  esac
}

[[ -n ${GPUMEMNET_REGISTRY:-} && -n ${GPUMEMNET_DATABASE_URL:-} ]] || end 2 "set GPUMEMNET_REGISTRY and GPUMEMNET_DATABASE_URL"
{ mkdir -p "$folder" && cd "$folder" && exec 9> .turn.lock; } || end 2 "$folder cannot be written to"
flock -n 9 || end 1 "another turn is still at work in $folder"
said=$folder/last-turn.txt
: > "$said" || end 2 "$folder cannot be written to"
# a slip of the pen would be a new registry, whose models nobody asks
[[ -d $GPUMEMNET_REGISTRY ]] || end 2 "there is no registry $GPUMEMNET_REGISTRY: correct the name, or make the folder"

"$python" -m gpumemnet observations export --out site.parquet ${RETRAIN_SINCE:+--since "$RETRAIN_SINCE"} >> "$said" 2>&1 ||
  failed $? "export of the observations"
grep -q '^0 observations ' "$said" && end 10 "no observations yet"

code=0
"$python" -m gpumemnet drift site.parquet >> "$said" 2>&1 || code=$?
if [[ -n ${RETRAIN_METRICS:-} && $code =~ ^(0|10)$ ]]; then  # the exporter never meets half a file
  printf 'gpumemnet_drift_due %d\ngpumemnet_drift_last_run_timestamp_seconds %(%s)T\n' $((code == 10)) -1 > "$RETRAIN_METRICS.new" &&
    mv -- "$RETRAIN_METRICS.new" "$RETRAIN_METRICS" || end 2 "$RETRAIN_METRICS cannot be written"
fi
case $code in
  0) end 10 "$(tail -n 1 "$said")" ;;
  10) ;;
  *) failed "$code" "drift" ;;
esac

code=0
nice -n 10 "$python" -m gpumemnet retrain --observations site.parquet --work "$folder" "$@" >> "$said" 2>&1 || code=$?
sentence=$(grep -v '^report: ' "$said" | tail -n 1)
case $code in
  0) end 0 "$sentence ($(grep '^report: ' "$said" | tail -n 1))" ;;
  10) end 10 "drift, and $sentence" ;;
  *) failed "$code" "retraining" ;;
esac
