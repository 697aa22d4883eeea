# The service with the shipped bundles: no torch, not root, and nothing to write to but its state and /tmp.
#
#   docker build -t gpumemnet .
#   docker run --rm --read-only --tmpfs /tmp -v state:/var/lib/gpumemnet -p 127.0.0.1:8000:8000 \
#     -v ./api-keys:/run/api-keys:ro -e GPUMEMNET_API_KEYS_FILE=/run/api-keys gpumemnet
#
# Without keys it does not listen on an address that others can reach; deploy/README.md tells how to make them, and
# The page Settings of the documentation lists every setting.  Own bundles: -v ./my-bundle:/bundle:ro -e GPUMEMNET_BUNDLES=/bundle

# The whole image, because the slim one has no compiler.
FROM python:3.12 AS build
WORKDIR /source
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY gpumemnet gpumemnet
COPY service service
# client: the admission webhook (integrations/kubernetes) runs from this image too.  What no service loads is left out; the rest is
# compiled to bytecode now, because a read-only file system keeps none.
RUN export GPUMEMNET_COMPILE=1 \
 && python -m venv --without-pip /opt/gpumemnet \
 && pip --python /opt/gpumemnet/bin/python install --no-cache-dir --no-compile --constraint constraints.txt '.[service,postgres,client]' \
 && find /opt/gpumemnet -type f \( -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.map' \) -delete \
 && /opt/gpumemnet/bin/python -I -c "import gpumemnet.service.app, httpx, psycopg, sqlalchemy.dialects.postgresql, sqlalchemy.dialects.sqlite" \
 && /opt/gpumemnet/bin/python -I -c "import uvicorn.loops.uvloop, uvicorn.protocols.http.httptools_impl" \
 && mkdir /state

FROM python:3.12-slim
COPY --from=build /opt/gpumemnet /opt/gpumemnet
COPY --from=build --chown=10001:10001 /state /var/lib/gpumemnet
ENV PATH=/opt/gpumemnet/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_STATE_HOME=/var/lib
VOLUME /var/lib/gpumemnet
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=15s \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/readyz', timeout=2)"]
CMD ["gpumemnet", "serve", "--host", "0.0.0.0", "--port", "8000"]
