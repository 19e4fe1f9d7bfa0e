#!/bin/sh
# Makes the cluster at the first start, then is the server. Nothing listens on a network: who may
# enter is who is the same user (auth "peer") and has the volume of the socket, so there is no password.
set -eu

bin=$(echo /usr/lib/postgresql/*/bin)
if [ ! -d /data/cluster ]; then
    rm -rf /data/new # of a start that was broken off
    "$bin/initdb" --auth=peer --username=riffle --encoding=UTF8 --locale=C --data-checksums \
        --pgdata=/data/new
    mv /data/new /data/cluster
fi
exec "$bin/postgres" -D /data/cluster -c listen_addresses= -c unix_socket_directories=/store
