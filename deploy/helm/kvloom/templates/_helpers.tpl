{{- define "kvloom.labels" -}}
app.kubernetes.io/name: kvloom
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "kvloom.selector" -}}
app.kubernetes.io/name: kvloom
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "kvloom.tlsSecret" -}}
{{- if .Values.tls.secretName }}{{ .Values.tls.secretName }}
{{- else if .Values.tls.certManager.issuer }}{{ .Release.Name }}-tls
{{- end }}
{{- end }}

{{- define "kvloom.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvloom.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "kvloom.env" -}}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: KVLOOM_ADVERTISE, value: $(POD_IP)}
- {name: KVLOOM_NAME_PREFIX, value: $(POD_NAME)-}
- {name: KVLOOM_CONFIG, value: /etc/kvloom/kvloom.toml}
- {name: KVLOOM_SECRET_FILE, value: /etc/kvloom-fabric/secret}
{{- if eq .Values.discovery "redis" }}
- {name: KVLOOM_REDIS_URL, valueFrom: {secretKeyRef: {name: {{ .Values.configSecret }}, key: redis-url}}}
{{- end }}
- {name: KVLOOM_METRICS_PORT, value: {{ .Values.metricsPort | quote }}}
{{- end }}

{{- define "kvloom.mounts" -}}
- {name: data, mountPath: /var/lib/kvloom}
- {name: tmp, mountPath: /tmp}
- {name: config, mountPath: /etc/kvloom, readOnly: true}
- {name: fabric, mountPath: /etc/kvloom-fabric, readOnly: true}
{{- end }}

{{- define "kvloom.volumes" -}}
- {name: data, emptyDir: {}}
- {name: tmp, emptyDir: {}}
- name: config
  secret: {secretName: {{ .Values.configSecret }}, defaultMode: 0440, items: [{key: kvloom.toml, path: kvloom.toml}]}
- name: fabric
  secret: {secretName: {{ .Values.fabricSecret }}, defaultMode: 0440, items: [{key: secret, path: secret}]}
{{- end }}

{{- define "kvloom.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector: {matchLabels: {{ include "kvloom.selector" . | fromYaml | toJson }}}
  - maxSkew: 1
    topologyKey: topology.kubernetes.io/zone
    whenUnsatisfiable: ScheduleAnyway
    labelSelector: {matchLabels: {{ include "kvloom.selector" . | fromYaml | toJson }}}
{{- end }}

{{/* Whether the processes of a pod run. It asks its own supervisor, without a port of its own. */}}
{{- define "kvloom.statusProbes" -}}
startupProbe: {exec: {command: [kvloom, status, --local]}, periodSeconds: 5, timeoutSeconds: 10, failureThreshold: 240}
livenessProbe: {exec: {command: [kvloom, status, --local]}, periodSeconds: 30, timeoutSeconds: 20, failureThreshold: 10}
{{- end }}
