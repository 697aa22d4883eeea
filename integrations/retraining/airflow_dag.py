"""One turn of the loop every night as a DAG of Airflow 3: export, look for drift, retrain where it
is due, tell.

Copy it into the folder of DAGs.  The worker's environment has ``GPUMEMNET_REGISTRY`` and
``GPUMEMNET_DATABASE_URL``, and may have ``RETRAIN_FOLDER`` (``/var/lib/gpumemnet/retrain``),
``RETRAIN_OPTIONS`` for ``gpumemnet retrain``, such as ``--challenger``, and ``PYTHON``
(``python3``): the one that gpumemnet is installed for; it need not be Airflow's.  No drift, and
nothing better, are skips and no failures.  A retraining that was cut off is tried again and goes on
where it was; no two work in one folder.
"""

from datetime import datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

SKIP = 99
START = (
    'cd "${RETRAIN_FOLDER:-/var/lib/gpumemnet/retrain}" || exit 2; '
    '[ -d "${GPUMEMNET_REGISTRY:-}" ] || { echo "there is no registry: set GPUMEMNET_REGISTRY to its folder"; exit 2; }; '
)
EXPORT = START + (
    'said=$("${PYTHON:-python3}" -m gpumemnet observations export --out site.parquet) || exit; echo "$said"; '
    f'case $said in "0 observations "*) exit {SKIP};; esac'
)
DRIFT = START + (
    '"${PYTHON:-python3}" -m gpumemnet drift site.parquet; code=$?; '
    f"case $code in 10) exit 0;; 0) exit {SKIP};; *) exit $code;; esac"
)
RETRAIN = (
    START
    + 'exec "${PYTHON:-python3}" -m gpumemnet retrain --observations site.parquet --work . ${RETRAIN_OPTIONS:-}'
)
NOTHING_BETTER = 10
TELL = 'exec "${PYTHON:-python3}" -m gpumemnet releases list'

with DAG(
    dag_id="gpumemnet_retrain",
    description="Retrains gpumemnet's models where drift calls for it",
    schedule="17 3 * * *",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
    dagrun_timeout=timedelta(hours=4),
    tags=["gpumemnet"],
) as dag:
    export = BashOperator(task_id="export", bash_command=EXPORT, skip_on_exit_code=SKIP, retries=2)
    drift = BashOperator(task_id="drift", bash_command=DRIFT, skip_on_exit_code=SKIP, retries=0)
    retrain = BashOperator(
        task_id="retrain", bash_command=RETRAIN, skip_on_exit_code=NOTHING_BETTER, retries=1
    )
    tell = BashOperator(task_id="tell", bash_command=TELL, retries=0)
    export >> drift >> retrain >> tell
