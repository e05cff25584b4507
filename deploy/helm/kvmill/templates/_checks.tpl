{{/* What needs several values to decide. The daemon would say the same, later and on every node. */}}
{{- define "kvmill.checks" -}}
{{- $v := .Values -}}
{{- if lt (include "kvmill.bytes" $v.hostBytes | int64) 67108864 -}}
{{- fail (printf "hostBytes %s: want at least 64MiB" $v.hostBytes) -}}
{{- end -}}
{{- if and (eq $v.profile "gpu") (lt (include "kvmill.bytes" $v.gpu.bytes | int64) 67108864) -}}
{{- fail (printf "gpu.bytes %s: want at least 64MiB" $v.gpu.bytes) -}}
{{- end -}}
{{- if lt (include "kvmill.bytes" $v.memoryOverhead | int64) 536870912 -}}
{{- fail (printf "memoryOverhead %s: want at least 512MiB, the daemon would be killed for memory" $v.memoryOverhead) -}}
{{- end -}}
{{- if gt (include "kvmill.seconds" $v.drain.timeout | int64) 3600 -}}
{{- fail (printf "drain.timeout %s: want at most 1h" $v.drain.timeout) -}}
{{- end -}}
{{- if lt (include "kvmill.bytes" $v.replicationRate | int64) 65536 -}}
{{- fail (printf "replicationRate %s: want at least 64KiB" $v.replicationRate) -}}
{{- end -}}
{{- if and $v.tls.peers (not $v.tls.existingSecret) -}}
{{- fail (printf "tls.peers %s: needs tls.existingSecret" (join "," $v.tls.peers)) -}}
{{- end -}}
{{- if include "kvmill.listens" . -}}
{{- if and $v.tls.existingSecret $v.tls.insecure -}}
{{- fail (printf "tls.existingSecret %s: tls.insecure is true as well; want one of them" $v.tls.existingSecret) -}}
{{- end -}}
{{- if not (or $v.tls.existingSecret $v.tls.insecure) -}}
{{- fail "TCP listeners (etcd.endpoints or remote.enabled) want TLS: set tls.existingSecret, or tls.insecure=true on a network that is trusted" -}}
{{- end -}}
{{- end -}}
{{- if and (gt (int $v.copies) 0) (not $v.etcd.endpoints) -}}
{{- fail (printf "copies %d: needs etcd.endpoints, without them no node knows another" (int $v.copies)) -}}
{{- end -}}
{{- if and $v.etcd.user (not (include "kvmill.etcdPasswordSecret" .)) -}}
{{- fail (printf "etcd.user %s: needs etcd.existingSecret or etcd.password" $v.etcd.user) -}}
{{- end -}}
{{- if and $v.etcd.password $v.etcd.existingSecret -}}
{{- fail (printf "etcd.existingSecret %s: etcd.password is set as well; want one of them" $v.etcd.existingSecret) -}}
{{- end -}}
{{- if and (include "kvmill.etcdPasswordSecret" .) (not $v.etcd.user) -}}
{{- fail "etcd.existingSecret, etcd.password: need etcd.user" -}}
{{- end -}}
{{- if and $v.etcd.tls.clientCertificate (not $v.etcd.tls.existingSecret) -}}
{{- fail "etcd.tls.clientCertificate: needs etcd.tls.existingSecret" -}}
{{- end -}}
{{- if and $v.disk.encryption.existingSecret (not $v.disk.enabled) -}}
{{- fail (printf "disk.encryption.existingSecret %s: needs disk.enabled" $v.disk.encryption.existingSecret) -}}
{{- end -}}
{{- with $v.serviceMonitor.authorization.existingSecret -}}
{{- $shown := dict -}}
{{- range $name, $tenant := $v.tenants -}}
{{- if and (get $tenant "tokens") (or (get $tenant "metrics") (get $tenant "admin")) -}}{{- $_ := set $shown $name true -}}{{- end -}}
{{- end -}}
{{- if not $shown -}}
{{- fail (printf "serviceMonitor.authorization.existingSecret %s: needs tenants with the digest of its token and metrics: true, or every scrape is refused" .) -}}
{{- end -}}
{{- end -}}
{{- if and $v.zone.name $v.zone.fromPodLabel -}}
{{- fail (printf "zone.name %s: zone.fromPodLabel is set as well; want one of them" $v.zone.name) -}}
{{- end -}}
{{- if and $v.hostNetwork $v.networkPolicy.enabled -}}
{{- fail "hostNetwork: network policies do not apply to it; set networkPolicy.enabled=false and shut the ports on the nodes" -}}
{{- end -}}
{{- if and $v.priorityClass.create (not $v.priorityClass.name) -}}
{{- fail "priorityClass.create: needs priorityClass.name" -}}
{{- end -}}
{{- $ucx := int $v.ports.ucx -}}
{{- if eq (int $v.ports.grpc) (int $v.ports.metrics) -}}
{{- fail (printf "ports.metrics %d: is ports.grpc as well" (int $v.ports.metrics)) -}}
{{- end -}}
{{- range $name := list "grpc" "metrics" -}}
{{- $port := index $v.ports $name | int -}}
{{- if and (ge $port $ucx) (le $port (add $ucx 15 | int)) -}}
{{- fail (printf "ports.%s %d: ports.ucx %d and the 15 that follow are the data plane's" $name $port $ucx) -}}
{{- end -}}
{{- end -}}
{{- range $name, $_ := $v.podLabels -}}
{{- if has $name (list "app.kubernetes.io/name" "app.kubernetes.io/instance") -}}
{{- fail (printf "podLabels.%s: selectors need this label as it is" $name) -}}
{{- end -}}
{{- end -}}
{{- end }}
